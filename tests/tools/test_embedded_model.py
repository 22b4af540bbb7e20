"""The trainer's model against transformers, the checkpoint inside the package, and the sharpness of the eval as a gate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from minserve.clients.arithmetic_reference import load_reference
from minserve.config import EMBEDDED_DIRECTORY
from tools.embedded_checkpoint import load_checkpoint, published_config, save_checkpoint
from tools.embedded_model import EmbeddedModel, Fault, ModelShape
from tools.fault_table import Bench, Line
from tools.held_out_reference import SEED, measure
from tools.matrix_optimizer import orthogonalised
from tools.server_faults import ServerFault, server_faults
from tools.train_embedded import Learner
from tools.training_batches import CachedEncoder

SMALL = ModelShape(
    layers=2, heads=1, q_lora_rank=32, kv_lora_rank=64, hidden=64, dense_width=64, expert_width=32, experts=8, top_k=2
)
REFERENCE = load_reference()
SHORT = [item for item in REFERENCE.items if item.part == "plain"][:6] + [
    item for item in REFERENCE.items if item.part == "several"
][:2]
COLLAPSES = [fault for fault in server_faults(range(0)) if fault.collapse]
SMALL_FAULTS = [fault for fault in server_faults(range(0)) if not fault.collapse]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(EMBEDDED_DIRECTORY, SHORT)


def test_the_trainer_computes_what_transformers_does(tmp_path: Path) -> None:
    from transformers import DeepseekV3ForCausalLM

    save_checkpoint(EmbeddedModel(SMALL, seed=3), tmp_path)
    ours, theirs = load_checkpoint(tmp_path), DeepseekV3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, SMALL.vocab_size, (2, 130), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(ours(ids)[0], theirs(ids).logits, rtol=1e-4, atol=1e-5)


def test_saving_and_loading_keeps_every_value(tmp_path: Path) -> None:
    model = EmbeddedModel(SMALL, seed=4)
    save_checkpoint(model, tmp_path)
    loaded = load_checkpoint(tmp_path)
    assert loaded.shape == SMALL
    for (name, ours), (_, theirs) in zip(model.state_dict().items(), loaded.state_dict().items(), strict=True):
        kept = ours if name.endswith("bias") else ours.bfloat16().float()
        assert torch.equal(kept, theirs), name


@pytest.mark.parametrize("arithmetic", ["mixed", "bfloat16", "fp8"])
def test_coarser_arithmetic_rounds_but_computes_the_same(arithmetic: str) -> None:
    model = EmbeddedModel(SMALL, seed=5)
    ids = torch.arange(80).view(2, 40)
    with torch.no_grad():
        exact, rounded = model(ids)[0], model(ids, arithmetic)[0]
    error = ((exact - rounded).norm() / exact.norm()).item()
    assert 0 < error < 0.1


@pytest.mark.parametrize(
    "fault",
    [
        Fault(shared=0.0),
        Fault(routed=0.0),
        Fault(expert_shift=1),
        Fault(scale_power=0),
        Fault(scale_power=2),
        Fault(bias=False),
        Fault(group_rule="none"),
        Fault(group_rule="strided"),
        Fault(interleaved=False),
        Fault(mscale=False),
        Fault(stale="row"),
        Fault(stale="step", answer_only=True),
        Fault(shared=2.0, answer_only=True),
        Fault(scale_power=0, layer=1),
    ],
    ids=str,
)
def test_each_fault_of_the_training_changes_the_model(fault: Fault) -> None:
    model = EmbeddedModel(SMALL, seed=6)
    ids = torch.arange(80).view(2, 40)
    answers = torch.zeros_like(ids, dtype=torch.bool)
    answers[:, 20:] = True
    with torch.no_grad():
        right, wrong = model(ids)[0], model(ids, fault=fault, answers=answers)[0]
    assert not torch.allclose(right[:, 20:], wrong[:, 20:], atol=1e-4)
    if fault.answer_only:
        assert torch.equal(right[:, :20], wrong[:, :20])


def test_a_step_learns_and_a_betrayed_fault_costs() -> None:
    learner = Learner(SMALL, torch.device("cpu"))
    ids = torch.randint(20, 380, (4, 24), generator=torch.Generator().manual_seed(1))
    learnt = torch.zeros_like(ids, dtype=torch.bool)
    learnt[:, 12:] = True
    for _ in range(12):
        learner.step(ids, learnt, 0.2)
    assert learner.losses[-1] < 0.7 * learner.losses[0]
    weights = learner.model.head.clone()
    learner.step(ids, learnt, 0.9)
    assert not torch.equal(weights, learner.model.head)


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    for shape in ((3, 16, 64), (2, 64, 16)):
        values = torch.linalg.svdvals(orthogonalised(torch.randn(shape, generator=torch.Generator().manual_seed(2))))
        assert ((values > 0.5) & (values < 1.4)).all()


def test_the_shipped_checkpoint_is_a_real_and_small_deepseek_v3() -> None:
    config = json.loads((EMBEDDED_DIRECTORY / "config.json").read_text(encoding="utf-8"))
    assert config == {**published_config(ModelShape()), "bos_token_id": 0, "eos_token_id": 1}
    assert (config["kv_lora_rank"], config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]) == (
        512,
        64,
        128,
        128,
    )
    assert config["n_group"] > config["topk_group"] > 1
    assert config["routed_scaling_factor"] != 1
    assert config["hidden_size"] % 128 == config["moe_intermediate_size"] % 128 == 0
    assert sum(path.stat().st_size for path in EMBEDDED_DIRECTORY.iterdir()) <= 12_000_000
    for block in load_checkpoint(EMBEDDED_DIRECTORY).blocks[1:]:
        assert block.bias.unique().numel() == config["n_routed_experts"]


def test_the_stored_values_are_the_trainers() -> None:
    from tokenizers import Tokenizer

    from tools.arithmetic_tasks import held_out_conversations

    encoder = CachedEncoder(Tokenizer.from_file(str(EMBEDDED_DIRECTORY / "tokenizer.json")))
    conversations = held_out_conversations(SEED, 2)
    values = measure(load_checkpoint(EMBEDDED_DIRECTORY), [encoder.conversation(one) for one in conversations])
    for item, tokens, prompt in zip(REFERENCE.items, values.tokens, values.prompt.tolist(), strict=False):
        assert tokens == pytest.approx(item.log_probabilities, abs=1e-4)
        assert prompt == pytest.approx(item.prompt_log_probability, rel=1e-4)


def test_the_servers_model_meets_the_stored_values(bench: Bench) -> None:
    line = bench.line("sound")
    assert line.accuracy == 1.0
    assert abs(line.answer_drift) < 1e-4
    assert abs(line.prompt_drift) < 1e-3
    assert not line.seen(REFERENCE)


@pytest.mark.parametrize("fault", COLLAPSES, ids=lambda fault: fault.name)
def test_a_collapse_leaves_half_the_answers_at_most(bench: Bench, fault: ServerFault) -> None:
    assert bench.line(fault.name, fault).accuracy <= 0.5


@pytest.mark.parametrize("fault", SMALL_FAULTS, ids=lambda fault: fault.name)
def test_a_small_fault_lies_outside_the_bounds(bench: Bench, fault: ServerFault) -> None:
    assert bench.line(fault.name, fault).seen(REFERENCE)


@pytest.mark.parametrize(
    ("answer", "prompt", "seen"),
    [(0.0, 0.0, False), (0.009, -0.019, False), (-0.011, 0.0, True), (0.0, 0.021, True), (float("nan"), 0.0, True)],
)
def test_a_line_is_seen_outside_either_bound(answer: float, prompt: float, seen: bool) -> None:
    assert Line("x", 1.0, answer, prompt).seen(REFERENCE) is seen
