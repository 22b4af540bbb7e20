"""Constrained requests through the engine's loop, beside free ones, with one step in flight."""

from __future__ import annotations

import functools
import random
import re
import threading

import msgspec
import pytest
import torch
from paged_steps import load
from runtime import constrained_loop, graph_doubles
from runtime.graph_doubles import HeldPlans, with_graphs
from runtime.prefix_model import PrefixModel, make_runner
from runtime.scripted import VOCAB, make_limits, next_token, request
from runtime.test_engine import Running, prompt
from waiting import PATIENCE

from minserve.kernels import reference
from minserve.messages import AbortRequests, Call, Reply, Vocabulary
from minserve.request import FinishReason, Grammar
from minserve.runtime import grammar as grammar_module
from minserve.runtime.grammar import TokenMasks
from minserve.runtime.model_runner import InFlight, ModelRunner
from minserve.runtime.step import ScheduledRow, ScheduledStep, SlotSetup

PIECES = [*(chr(ord("a") + i).encode() for i in range(26)), b"ab", b"abc", b"cab", b"ba", b"</r>"]
PIECES += [b""] * (VOCAB - len(PIECES))
END = VOCAB - 1
REASONING_END = PIECES.index(b"</r>")


def constrained(request_id, tokens, max_tokens, text, stop=(END,), **reasoning):
    asked = request(request_id, tokens, max_tokens, stop=stop)
    grammar = Grammar('%llguidance {"no_forcing": true}\nstart: ' + text, **reasoning)
    return msgspec.structs.replace(asked, sampling=msgspec.structs.replace(asked.sampling, grammar=grammar))


def choice(request_id, tokens, options, **more):
    return constrained(request_id, tokens, 20, " | ".join(f'"{option}"' for option in options), **more)


def answer(asked, options, free_until=None):
    """What the request must say: of the tokens that lead to an option the model's own, or else the lowest."""
    tokens, outputs, reached = list(asked.prompt_token_ids), [], ""
    free = free_until is not None
    while len(outputs) < asked.sampling.max_tokens:
        wanted = next_token(enumerate(tokens + outputs))
        if free:
            outputs.append(wanted)
            free = wanted != free_until
            continue
        ways = [i for i, piece in enumerate(PIECES) if piece and any(o.startswith(reached + piece.decode()) for o in options)]
        if not ways:
            return outputs, FinishReason.STOP
        if reached in options:
            ways += asked.sampling.stop_token_ids
        outputs.append(wanted if wanted in ways else min(ways))
        if outputs[-1] in asked.sampling.stop_token_ids:
            return outputs, FinishReason.STOP
        reached += PIECES[outputs[-1]].decode()
    return outputs, FinishReason.STOP if not free and reached and not any(
        o.startswith(reached) and o != reached for o in options
    ) else FinishReason.LENGTH


@pytest.fixture
def start():
    running = []

    def make(**limits):
        running.append(Running(**limits))
        running[-1].front.send(Vocabulary(PIECES, []))
        return running[-1]

    yield make
    for one in running:
        one.stop()


def check(running, asked, options, free_until=None):
    running.front.finish(asked.id)
    tokens, reason = answer(asked, options, free_until)
    assert running.front.tokens(asked.id) == tokens
    assert running.front.reason(asked.id) is reason


OPTIONS = ["abcabc", "abba", "cabcab", "a", "bb"]


def test_constrained_and_free_requests_in_one_batch(start):
    running = start(num_pages=200, max_num_seqs=8)
    free = [request(i, prompt(3 + i, 1), 8) for i in range(10)]
    bound = [choice(100 + i, prompt(2 + i, 2), OPTIONS) for i in range(10)]
    for pair in zip(free, bound, strict=True):
        running.front.ask(*pair)
    running.check(*free)
    for asked in bound:
        check(running, asked, OPTIONS)
        assert "".join(PIECES[token].decode() for token in running.front.tokens(asked.id)) in OPTIONS
    running.front.rest()


def test_the_text_of_the_last_token_is_told_apart_from_the_end(start):
    """The edge hides the token that comes with a stop; this one belongs to the text."""
    running = start()
    running.front.ask(choice(1, prompt(4), ["bb"]))
    running.front.finish(1)
    outputs = running.front.outputs[1]
    assert (outputs[-1].token_ids, outputs[-1].finish_reason) == ((), FinishReason.STOP)
    assert all(output.finish_reason is None and output.token_ids for output in outputs[:-1])


def test_under_pressure_constrained_requests_say_the_same(start):
    """Preempted requests are computed again; their place in the grammar stays."""
    running = start(num_pages=12, page_size=4, max_num_seqs=6, max_model_len=48, enable_prefix_caching=False)
    options = ["abcabcabcabcabcabc", "babababababababab"]
    bound = [choice(i, prompt(6 + i, i), options) for i in range(8)]
    free = [request(100 + i, prompt(5, i), 20) for i in range(4)]
    running.front.ask(*bound, *free)
    running.check(*free)
    for asked in bound:
        check(running, asked, options)
    assert running.front.stats.num_preemptions > 0
    running.front.rest()


def test_reasoning_is_free_and_then_the_grammar_holds(start):
    running = start(num_pages=400, max_model_len=400)
    done = 0
    for number in range(200):
        asked = choice(number, prompt(3, number), OPTIONS, starts_after="</r>")
        asked = msgspec.structs.replace(asked, sampling=msgspec.structs.replace(asked.sampling, max_tokens=60, stop_token_ids=()))
        if REASONING_END in answer(asked, OPTIONS, REASONING_END)[0] and done < 5:
            done += 1
            running.front.ask(asked)
            check(running, asked, OPTIONS, REASONING_END)
    assert done == 5


BAD = ['"a', "other", '%json {"type": "strin"}', "%json false", '%json {"$ref": "#"}']


def test_bad_grammars_end_their_own_requests(start):
    running = start(max_num_seqs=8)
    free, good = request(1, prompt(5), 12), choice(2, prompt(5), OPTIONS)
    bad = [constrained(10 + i, prompt(4, i), 20, text) for i, text in enumerate(BAD)]
    running.front.ask(free, *bad, good)
    running.check(free)
    check(running, good, OPTIONS)
    for asked in bad:
        running.front.finish(asked.id)
        (output,) = running.front.outputs[asked.id]
        assert (output.finish_reason, output.is_bad_request, output.token_ids) == (FinishReason.ERROR, True, ())
        assert output.error is not None and output.error.startswith("the grammar cannot be followed: ")
    running.front.rest()


def test_a_grammar_that_leads_nowhere_ends_its_request_on_the_way(start):
    running = start(max_num_seqs=8)
    free, good = request(1, prompt(5), 30), choice(2, prompt(5), OPTIONS)
    running.front.ask(free, constrained(3, prompt(4), 20, '"ab" "1"'), good)
    running.check(free)
    check(running, good, OPTIONS)
    running.front.finish(3)
    assert running.front.outputs[3][-1].is_bad_request
    assert "".join(PIECES[token].decode() for token in running.front.tokens(3)) == "ab"
    running.front.rest()


def test_a_slow_grammar_holds_up_nobody_and_can_be_aborted(start, monkeypatch):
    compile_ = grammar_module.Grammars._compile
    go_on = threading.Event()

    def compile_slowly(self, text):
        if "zzz" in text:
            assert go_on.wait(PATIENCE)
        return compile_(self, text)

    monkeypatch.setattr(grammar_module, "COMPILE_SECONDS", PATIENCE)

    monkeypatch.setattr(grammar_module.Grammars, "_compile", compile_slowly)
    running = start(max_num_seqs=8)
    running.front.ask(choice(1, prompt(4), ["zzz"]), choice(2, prompt(4), ["zzz", "a"]), request(3, prompt(5), 12))
    running.front.ask(choice(4, prompt(5), ["ab"]))
    running.front.send(AbortRequests([2]))
    running.front.finish(3)
    assert running.front.reason(1) is None
    go_on.set()
    running.front.finish(1, 4)
    running.front.rest()
    assert not running.front.outputs[2]


def test_masks_are_counted(start):
    running = start()
    running.front.ask(choice(1, prompt(4), ["abcab"]))
    running.front.finish(1)
    running.front.send(Call(7, "server_info"))
    running.front.wait(lambda: any(isinstance(message, Reply) for message in running.front.messages))
    (reply,) = [message for message in running.front.messages if isinstance(message, Reply)]
    assert reply.result["grammars"]["masks"] >= len(running.front.tokens(1))
    assert reply.result["grammars"]["seconds"] > 0


class AheadOfMasks(ModelRunner):
    """Forwards run at their launch, as on a GPU: before the host knows what their rows may sample."""

    def _start(self, step, staged, padded, awaits_masks):
        finish = functools.partial(self._finish, step, self._run(step, staged, padded))
        read = functools.partial(self._read, step, "no graphs")
        launched = InFlight(step, finish, read, finish_late=False)
        if not awaits_masks:
            launched.constrain(None)
        return launched


def small_runners(directory):
    """A real model: eager, ahead of the masks, and so with graphs that replay its decode steps."""
    limits = make_limits(vocab_size=320, max_num_seqs=6, num_pages=100, page_size=16, max_model_len=200, chunked_prefill_size=64)
    made = []
    for kernels in (reference.cpu(), reference.cpu(), HeldPlans().kernels()):
        made.append(graph_doubles.runner_of(load(directory), kernels, limits))
    made[1].__class__ = made[2].__class__ = AheadOfMasks
    return made[0], made[1], with_graphs(made[2], (1, 4, 6))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_graphs_that_know_nothing_of_masks_give_the_same_tokens(tiny_dir, temperature):
    pieces = [bytes([byte]) for byte in range(256)] + [b""] * 64
    regex = r"[a-c]{3,9}-\d{2}(x|yz)"
    requests = []
    for number in range(9):
        asked = constrained(number, prompt(3 + number, number), 16, f"/{regex}/", stop=(300,))
        changes = {
            "temperature": temperature,
            "seed": number,
            "frequency_penalty": 0.5 * (number % 2),
            "logprobs": 2 * (number % 3) or None,
        }
        changes |= {"grammar": None} if number % 3 == 2 else {}
        requests.append(msgspec.structs.replace(asked, sampling=msgspec.structs.replace(asked.sampling, **changes)))
    eager, ahead, replayed = (constrained_loop.run(runner, requests, pieces) for runner in small_runners(tiny_dir("qwen3_moe")))
    assert ahead == eager
    assert replayed == eager
    for number in (0, 1, 3, 4, 6, 7):
        assert re.fullmatch(regex, bytes(token for token in eager[number] if token != 300).decode())


def masks_of(places, allowed):
    bits = torch.zeros(len(places), VOCAB // 32 + 1, dtype=torch.int64)
    for row, tokens in enumerate(allowed):
        for token in tokens:
            bits[row, token // 32] |= 1 << token % 32
    return TokenMasks(places, torch.where(bits < 1 << 31, bits, bits - (1 << 32)).to(torch.int32))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_constrained_row_samples_as_if_its_logits_had_been_masked_at_once(temperature):
    """Same tokens, same random numbers, same counts for penalties, at any place among other rows."""
    dice = random.Random(4)
    allowed = [dice.sample(range(VOCAB), 6) for _ in range(2)]
    sampling = {"max_tokens": 9, "temperature": temperature, "frequency_penalty": 0.7, "repetition_penalty": 1.3}

    def run(requests, masks, bias=()):
        runner = make_runner(make_limits(max_num_seqs=4), PrefixModel())
        rows = []
        for slot, (tokens, seed) in enumerate(requests):
            params = msgspec.structs.replace(request(1, tokens, 9).sampling, **sampling, seed=seed)
            if slot in dict(bias):
                params = msgspec.structs.replace(params, logit_bias={t: -1e9 for t in range(VOCAB) if t not in dict(bias)[slot]})
            rows.append(
                ScheduledRow(
                    request_id=slot,
                    slot=slot,
                    start=0,
                    num_tokens=len(tokens),
                    token_ids=tuple(tokens),
                    new_pages=(slot + 1,),
                    samples=True,
                    setup=SlotSetup(params, tokens),
                )
            )
        step = ScheduledStep(number=1, rows=tuple(rows), num_decode_rows=0, num_tokens=sum(len(t) for t, _ in requests))
        launched = runner.launch(step, awaits_masks=masks is not None)
        launched.constrain(masks)
        tokens = [result.token_id for result in launched.result().rows]
        state = runner.sampler
        return tokens, state.last_tokens[:4].tolist(), state.output_index[:4].tolist(), state.token_counts[:4].tolist()

    for seed in range(20):
        requests = [(prompt(3, seed), seed), (prompt(4, seed), seed + 1), (prompt(2, seed), seed + 2)]
        bias = [(1, allowed[0]), (2, allowed[1])]
        assert run(requests, masks_of([1, 2], allowed)) == run(requests, None, bias)
