"""What `minserve plan` says before any GPU is rented, on the published configs."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import PATIENCE

from minserve import plan_picture
from minserve.config import Config
from minserve.errors import CheckpointError, EnvironmentFault, ServerError, UsageError
from minserve.models.registry import ROWS
from minserve.plan import MAX_RANKS, MODEL_TYPES, buffer_bytes, describe, make_plan, read_config
from minserve.roofline import H200, parameters, shape_from_config, weight_bytes

SHAPES = Path(__file__).parent.parent / "configs" / "shapes"
TOTALS = {
    "deepseek-v3": 671.0, "kimi-k2-instruct": 1026.4, "kimi-k2-thinking": 1026.4, "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235.1, "moonlight-16b-a3b": 16.0, "deepseek-v2-lite": 15.7,
}  # fmt: skip
"""Billions of parameters, as published."""


WRONG = [None, True, "x", "", [], [1], {}, {"a": 1}, 0, -1, 0.5, float("inf"), float("nan"), 1e300, 2**80]


def config_of(name: str) -> dict[str, Any]:
    return json.loads((SHAPES / name / "config.json").read_text())


def minserve(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "minserve", *words], capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.parametrize("name", TOTALS)
def test_published_totals(name: str) -> None:
    assert round(make_plan(config_of(name), Config()).parameters / 1e9, 1) == TOTALS[name]


def test_a_rank_holds_its_share_of_experts_and_all_of_the_rest() -> None:
    one, eight = (make_plan(config_of("deepseek-v3"), Config(ep_size=size)) for size in (1, 8))
    assert eight.weights["routed_experts"] == one.weights["routed_experts"] / 8
    assert {k: v for k, v in one.weights.items() if k != "routed_experts"} == {
        k: v for k, v in eight.weights.items() if k != "routed_experts"
    }
    assert not one.fits and eight.fits
    assert "communication" in eight.buffers and "communication" not in one.buffers
    # 58 layers of 32 experts in FP8, each of 3 * 7168 * 2048 values and one fp32 scale for each 128 x 128 of them.
    assert eight.weights["routed_experts"] == pytest.approx(58 * 32 * 3 * 7168 * 2048 * (1 + 4 / 128**2))


def test_int4_is_a_quarter_and_its_scales() -> None:
    shape = shape_from_config(config_of("kimi-k2-thinking"))
    assert weight_bytes(shape)["routed_experts"] == parameters(shape)["routed_experts"] * (0.5 + 2 / 32)
    assert (shape.linears, shape.experts) == ("plain", "int4")
    wrapped = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": config_of("kimi-k2-thinking")}
    assert shape_from_config(wrapped) == shape


@pytest.mark.parametrize(
    "section",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"0": {"weights": {"num_bits": 8}}}},
    ],
)
def test_formats_that_no_start_would_accept_are_refused(section: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="quantization_config"):
        make_plan(config_of("qwen3-30b-a3b") | {"quantization_config": section}, Config())


@pytest.mark.parametrize("name", TOTALS)
@pytest.mark.parametrize("ep_size", [1, 8])
def test_parts_add_up_to_the_usable_memory(name: str, ep_size: int) -> None:
    plan = make_plan(config_of(name), Config(ep_size=ep_size))
    held = sum(plan.weights.values()) + sum(plan.buffers.values())
    assert plan.usable == pytest.approx(0.9 * H200.memory_bytes)
    if plan.fits:
        assert held + plan.kv_cache == pytest.approx(plan.usable)
        # Whole pages, and the dummy page beside them.
        assert 0 <= plan.kv_cache - (plan.kv_tokens + 64) * plan.kv_bytes_per_token < 64 * plan.kv_bytes_per_token
    else:
        assert plan.kv_tokens == 0
    assert list(plan.floors) == [1, 8, 32, 128, 256]
    assert list(plan.floors.values()) == sorted(set(plan.floors.values()))


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2-instruct", "kimi-k2-thinking", "qwen3-235b-a22b"])
def test_the_advice_is_true_and_the_least(name: str) -> None:
    """Following the sentence makes it fit, and one step less does not."""
    plan = make_plan(config_of(name), Config())
    assert not plan.fits
    size = int(plan.verdict.partition("raise --ep-size to ")[2].split()[0])
    assert make_plan(config_of(name), Config(ep_size=size)).fits
    experts = shape_from_config(config_of(name)).num_experts
    smaller = [tried for tried in range(1, size) if experts % tried == 0]
    assert not any(make_plan(config_of(name), Config(ep_size=tried)).fits for tried in smaller)


def test_too_long_a_context_names_the_longest_that_fits() -> None:
    config = config_of("qwen3-235b-a22b")
    settings = Config(ep_size=8, max_model_len=40960, max_num_seqs=64, chunked_prefill_size=2048, gpu_memory_utilization=0.56)
    plan = make_plan(config, settings)
    assert not plan.fits
    length = int(plan.verdict.partition("lower --max-model-len to ")[2].split()[0])
    assert f"the KV cache holds {length:,} tokens and --max-model-len is 40,960" in plan.verdict
    assert make_plan(config, msgspec.structs.replace(settings, max_model_len=length)).fits
    assert not make_plan(config, msgspec.structs.replace(settings, max_model_len=length + 1)).fits


def test_what_no_flag_can_help_is_said() -> None:
    config = config_of("qwen3-30b-a3b") | {"num_experts": 0, "num_hidden_layers": 2000}
    assert f"no --ep-size up to {MAX_RANKS} is enough" in make_plan(config, Config()).verdict


def test_smaller_steps_are_advised_where_only_they_help() -> None:
    config = config_of("moonlight-16b-a3b")
    wanted = Config(ep_size=64, chunked_prefill_size=1 << 20)
    plan = make_plan(config, wanted)
    assert plan.verdict.endswith("too much for a rank; lower --chunked-prefill-size to 262144")
    assert make_plan(config, msgspec.structs.replace(wanted, chunked_prefill_size=262144)).fits
    assert buffer_bytes(shape_from_config(config), wanted)["step"] > buffer_bytes(shape_from_config(config), Config())["step"]


def test_redundant_experts_are_shared_as_the_others_are() -> None:
    config = config_of("moonlight-16b-a3b")
    plain, three = make_plan(config, Config()), make_plan(config, Config(ep_size=3, redundant_experts=2))
    assert three.weights["routed_experts"] == plain.weights["routed_experts"] / 64 * (64 + 2) / 3


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (Config(ep_size=3), "--ep-size 3 does not divide the model's 64 experts; possible: 1, 2, 4, 8, 16, 32, 64"),
        (
            Config(ep_size=4, redundant_experts=2),
            "--ep-size 4 does not divide the model's 64 experts and 2 redundant ones; possible: 1, 2, 3, 6, 11, 22, 33",
        ),
        (Config(max_model_len=8193), "--max-model-len 8193 is more than the model's max_position_embeddings of 8192"),
    ],
)
def test_settings_that_the_model_does_not_have(asked: Config, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_plan(config_of("moonlight-16b-a3b"), asked)


def test_yarn_stretches_the_context() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = config_of("qwen3-30b-a3b") | {"rope_scaling": yarn}
    assert make_plan(config, Config(max_model_len=131072)).fits


@pytest.mark.parametrize(
    ("body", "message"),
    [("{", "not valid JSON"), ("[]", "no JSON object"), ('{"model_type": "qwen3_moe"}', "num_hidden_layers is missing")],
)
def test_a_damaged_config(tmp_path: Path, body: str, message: str) -> None:
    (tmp_path / "config.json").write_text(body)
    with pytest.raises(CheckpointError, match=message):
        make_plan(*read_config(tmp_path)[:1], Config())
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_config(tmp_path / "absent")


@given(
    name=st.sampled_from(sorted(TOTALS)),
    changes=st.lists(st.tuples(st.integers(0, 60), st.sampled_from(WRONG) | st.integers(-2, 2**40)), min_size=1, max_size=3),
    ep_size=st.sampled_from([1, 2, 8]),
)
@settings(max_examples=300, deadline=None)
def test_fuzz_configs_give_a_plan_or_a_sentence(name: str, changes: list[tuple[int, Any]], ep_size: int) -> None:
    config = config_of(name)
    for place, value in changes:
        config[sorted(config)[place % len(config)]] = value
    with contextlib.suppress(ServerError):
        assert describe(make_plan(config, Config(ep_size=ep_size))).splitlines()[-1].startswith(("fits", "does not fit"))


def test_kinds_that_are_not_served_are_not_planned() -> None:
    assert {row.model_type for row in ROWS} == MODEL_TYPES
    for config in ({}, {"model_type": "qwen3_next"}, {"model_type": "llama", "text_config": None}):
        with pytest.raises(CheckpointError, match=f"model_type is {config.get('model_type')!r}; known: deepseek_v2, "):
            make_plan(config_of("qwen3-30b-a3b") | {"model_type": None} | config, Config())
    inner = config_of("kimi-k2-instruct")
    del inner["model_type"]
    assert make_plan({"model_type": "kimi_k25", "text_config": inner}, Config(ep_size=16)).fits


def test_the_index_beside_the_config_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen3-30b-a3b")))
    index = {"metadata": {"total_size": 61_064_245_248}, "weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    config, notes = read_config(tmp_path / "config.json")
    assert "the index lists 2 files, 61.1 GB" in describe(make_plan(config, Config(), notes))


def test_nvfp4_counts_as_what_it_is_widened_to(tmp_path: Path) -> None:
    plain = config_of("kimi-k2-thinking")
    del plain["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(plain))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    plan = make_plan(read_config(tmp_path)[0], Config(ep_size=8))
    assert plan.weights == make_plan(plain, Config(ep_size=8)).weights
    assert "note: NVFP4 weights are widened to 16 bits while they are loaded" in describe(plan)


# ---- the command


def test_the_command_prints_a_table_and_exits_0_or_5() -> None:
    done = minserve("plan", str(SHAPES / "qwen3-30b-a3b"), "--max_model_len", "4096")
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("fits: the KV cache of a rank holds 71") and "128 requests of 4,096 tokens" in last
    assert "routed experts" in done.stdout and "(estimate)" in done.stdout and "1.44 ms" in done.stdout
    done = minserve("plan", str(SHAPES / "deepseek-v3"), "--json")
    assert done.returncode == 5
    body = json.loads(done.stdout)
    assert (body["fits"], body["ep_size"], body["kv_tokens"]) == (False, 1, 0)
    assert body["verdict"].endswith("raise --ep-size to 8")
    assert minserve("plan", "embedded").stdout.splitlines()[-1].startswith("fits: ")
    done = minserve("plan", str(SHAPES / "deepseek-v3"), "--gpu", "abacus")
    assert done.returncode == 2 and "--gpu abacus is not known; known: h200" in done.stderr


def test_the_command_needs_no_torch() -> None:
    """It must answer at once, on a laptop."""
    code = "import sys; from minserve import cli; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE).returncode == 0


def test_the_picture_has_a_bar_for_each_rank(tmp_path: Path) -> None:
    done = minserve("plan", str(SHAPES / "deepseek-v3"), "--ep-size", "8", "--plot", str(tmp_path / "memory.svg"))
    assert done.returncode == 0, done.stderr
    drawn = (tmp_path / "memory.svg").read_text()
    plan = make_plan(config_of("deepseek-v3"), Config(ep_size=8))
    assert drawn.count("<!-- KV cache -->") == 1 and "usable of an h200" in drawn
    assert drawn.count('style="fill') > 8 * (len(plan.weights) + len(plan.buffers))
    with pytest.raises(UsageError, match=r"--plot .*memory\.what"):
        plan_picture.draw(plan, tmp_path / "memory.what")


def test_without_matplotlib_the_picture_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(EnvironmentFault, match=r"pip install 'minserve\[plot\]'"):
        plan_picture.draw(make_plan(config_of("deepseek-v3"), Config()), tmp_path / "m.png")
