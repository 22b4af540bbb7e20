"""Real tiny checkpoints through assembly, scheduler and runner: the tokens are transformers' own, however they came about."""

from __future__ import annotations

import random

import pytest
import torch
from runtime.scripted import Loop, request
from tiny_checkpoints import VOCAB_SIZE

from minserve.config import Config
from minserve.request import FinishReason
from minserve.runtime.assembly import assemble
from minserve.runtime.startup import Timeline

TOLERANCE = 1e-3
"""Of logits: a token counts as right when none has a logit higher by more than this."""
MODELS = ["qwen3_moe", "deepseek_v3"]
LENGTHS = [1, 7, 64, 65, 130]


def prompt(length, seed=0):
    return random.Random(f"{seed}/{length}").choices(range(VOCAB_SIZE - 64), k=length)


class RealLoop(Loop):
    """The loop with a real model, and transformers' judgement of its tokens."""

    def __init__(self, checkpoint, **settings):
        torch.set_num_threads(1)
        values = {"model": str(checkpoint.directory), "max_num_seqs": 8, "num_pages": 40, "max_model_len": 512}
        parts = assemble(Config(**(values | settings)), Timeline(lambda _: None, "test"))
        super().__init__(parts.runner.limits, parts.runner)
        self.reference = checkpoint.reference
        self.vocab_size = VOCAB_SIZE

    def check_answer(self, request_id):
        tokens, asked = self.tokens[request_id], self.requests[request_id]
        start = len(asked.prompt_token_ids) - 1
        with torch.inference_mode():
            logits = self.reference(torch.tensor([asked.prompt_token_ids + tokens])).logits[0, start:-1].float()
        shortfall = logits.amax(-1) - logits.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        assert shortfall.max().item() < TOLERANCE
        assert self.reasons[request_id] is FinishReason.LENGTH
        assert len(tokens) == asked.sampling.max_tokens


@pytest.fixture
def make_loop(tiny):
    return lambda name, **settings: RealLoop(tiny(name), **settings)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "settings", [{}, {"chunked_prefill_size": 7}, {"chunked_prefill_size": 64}, {"page_size": 1, "num_pages": 512}]
)
def test_unequal_prompts_in_one_batch(make_loop, name, settings):
    loop = make_loop(name, **settings)
    for index, length in enumerate(LENGTHS):
        loop.add(request(index, prompt(length, index), 6))
    loop.run()
    for index in range(len(LENGTHS)):
        loop.check_answer(index)
    loop.check_at_rest()


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_token_by_token(make_loop, name):
    loop = make_loop(name, chunked_prefill_size=1)
    loop.add(request(1, prompt(65), 4))
    loop.run()
    loop.check_answer(1)


@pytest.mark.parametrize("name", MODELS)
def test_after_prefix_hits_of_every_kind(make_loop, name):
    """Hits of exactly one page, of one page and a bit, of two, and of a whole earlier prompt."""
    loop = make_loop(name, chunked_prefill_size=50)
    for index, length in enumerate([128, 64, 65, 127, 128, 129, 63]):
        loop.add(request(index, [*prompt(128), 7, 8, 9][:length], 3))
        loop.run()
        loop.check_answer(index)
    cached = [loop.outputs[index][0].cached_tokens for index in range(7)]
    assert cached == [0, 63, 64, 64, 127, 128, 0]
    loop.check_at_rest()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("caching", [False, True])
def test_after_preemption_with_memory_for_one_and_a_half(make_loop, name, caching):
    loop = make_loop(name, page_size=8, num_pages=12, max_model_len=64, enable_prefix_caching=caching)
    loop.add(request(1, prompt(9, 1), 55))
    loop.add(request(2, prompt(14, 2), 40))
    loop.run()
    loop.check_answer(1)
    loop.check_answer(2)
    assert loop.scheduler.stats().num_preemptions >= 1
    loop.check_at_rest()


@pytest.mark.parametrize("name", MODELS)
def test_prompt_logprobs_in_chunks(make_loop, tiny, name):
    loop = make_loop(name, chunked_prefill_size=20)
    tokens = prompt(50)
    loop.add(request(1, tokens, 1, prompt_logprobs=2, logprobs=2))
    loop.run()
    with torch.inference_mode():
        expected = torch.log_softmax(tiny(name).reference(torch.tensor([tokens])).logits[0].float(), -1)
    output = loop.outputs[1][0]
    assert output.prompt_logprobs[0] is None
    for index, entry in enumerate(output.prompt_logprobs[1:]):
        assert entry.token_id == tokens[index + 1]
        assert entry.logprob == pytest.approx(expected[index, entry.token_id].item(), abs=TOLERANCE)
        assert entry.top_logprobs[0] == pytest.approx(expected[index].max().item(), abs=TOLERANCE)
    assert output.logprobs[0].logprob == pytest.approx(expected[-1].max().item(), abs=TOLERANCE)


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"kv_cache_dtype": "bfloat16"}])
def test_narrow_types_run_on_the_cpu(make_loop, settings):
    loop = make_loop("qwen3_moe", **settings)
    loop.add(request(1, prompt(20), 5))
    loop.run()
    assert len(loop.tokens[1]) == 5


def test_dummy_weights_run_without_a_weight_file(make_loop, tiny, tmp_path):
    (tmp_path / "config.json").write_bytes((tiny("qwen3_moe").directory / "config.json").read_bytes())
    loop = make_loop("qwen3_moe", model=str(tmp_path), load_format="dummy")
    loop.add(request(1, prompt(20), 5))
    loop.run()
    assert len(loop.tokens[1]) == 5


def test_the_judge_is_sharp(make_loop):
    loop = make_loop("qwen3_moe")
    loop.add(request(1, prompt(20), 5))
    loop.run()
    loop.check_answer(1)
    loop.tokens[1][2] = (loop.tokens[1][2] + 1) % VOCAB_SIZE
    with pytest.raises(AssertionError):
        loop.check_answer(1)
