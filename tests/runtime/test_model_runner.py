"""The runner and its batches on the CPU, with a model that reads every token of its prefix through the paged cache."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime.prefix_model import LOGIT, SHAPE, PrefixModel, make_runner
from runtime.scripted import VOCAB, Loop, make_limits, next_token, request

from minserve.models.sampler import SamplerState, sample
from minserve.request import FinishReason, Request, SamplingParams
from minserve.runtime import model_runner
from minserve.runtime.batch import BatchBuilder
from minserve.runtime.device_memory import trial_step
from minserve.runtime.step import ScheduledRow, ScheduledStep, SlotSetup


def prompt(length, seed=0):
    return random.Random(f"{seed}/{length}").choices(range(VOCAB), k=length)


def make_loop(**changes):
    limits = make_limits(**changes)
    return Loop(limits, make_runner(limits))


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 7, 64])
@pytest.mark.parametrize("page_size", [1, 3, 4, 64])
def test_tokens_through_the_page_tables(chunk, page_size):
    loop = make_loop(chunked_prefill_size=chunk, page_size=page_size, num_pages=200)
    for index in range(6):
        loop.add(request(index, prompt(5 * index + 1, index % 4), 4 + 3 * index))
    loop.run()
    for index in range(6):
        loop.check_answer(index)
    loop.check_at_rest()


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    page_size=st.sampled_from([1, 2, 4, 8]),
    spare=st.integers(0, 8),
    chunk=st.sampled_from([1, 3, 16]),
    slots=st.integers(1, 4),
    caching=st.booleans(),
)
def test_any_mix_of_requests_under_pressure(seed, page_size, spare, chunk, slots, caching):
    """Preemption, prefix hits and aborts through the real batches: the tokens stay those of the request alone."""
    dice = random.Random(seed)
    loop = make_loop(
        page_size=page_size,
        num_pages=-(-48 // page_size) + spare,
        max_model_len=48,
        chunked_prefill_size=chunk,
        max_num_seqs=slots,
        enable_prefix_caching=caching,
    )
    source = prompt(40)
    dropped = set()
    for index in range(8):
        loop.add(request(index, source[: dice.randint(1, 40)], dice.randint(0, 20), stop=(dice.randrange(VOCAB),)))
        for _ in range(dice.randint(0, 6)):
            loop.turn()
        if dice.random() < 0.2:
            loop.drop(index)
            dropped.add(index)
    loop.run()
    for index in set(range(8)) - dropped:
        loop.check_answer(index)
    loop.check_at_rest()


def test_nothing_is_computed_before_the_result_is_asked_for():
    limits = make_limits()
    model = PrefixModel()
    runner = make_runner(limits, model)
    row = ScheduledRow(request_id=1, slot=0, start=0, num_tokens=3, token_ids=(1, 2, 3), new_pages=(1,), samples=True)
    in_flight = runner.launch(ScheduledStep(number=1, rows=(row,), num_decode_rows=0, num_tokens=3))
    assert model.forwards == 0
    assert in_flight.result().rows[0].token_id == next_token(enumerate([1, 2, 3]))
    assert model.forwards == 1


def test_two_steps_may_be_launched_before_the_first_is_read():
    """The second one's input token is on the device only; its layout must not disturb the first one's."""
    runner = make_runner(make_limits())
    first = ScheduledRow(request_id=1, slot=2, start=0, num_tokens=4, token_ids=(9, 8, 7, 6), new_pages=(3,), samples=True)
    second = ScheduledRow(request_id=1, slot=2, start=4, num_tokens=1, table_offset=1, new_pages=(5,), samples=True)
    steps = [ScheduledStep(number=1, rows=(first,), num_decode_rows=0, num_tokens=4)]
    steps.append(ScheduledStep(number=2, rows=(second,), num_decode_rows=1, num_tokens=1))
    launched = [runner.launch(step) for step in steps]
    tokens = [in_flight.result().rows[0].token_id for in_flight in launched]
    one = next_token(enumerate([9, 8, 7, 6]))
    assert tokens == [one, next_token(enumerate([9, 8, 7, 6, one]))]


def test_only_parts_of_prompts_do_not_go_through_the_head():
    model = PrefixModel()
    limits = make_limits(chunked_prefill_size=4)
    loop = Loop(limits, make_runner(limits, model))
    loop.add(request(1, prompt(14), 2))
    loop.run()
    loop.check_answer(1)
    assert model.head_rows == [1, 1]


@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("piece", [1, 4, 1000])
def test_prompt_scores(chunk, piece, monkeypatch):
    monkeypatch.setattr(model_runner, "SCORING_LOGITS_BYTES", 4 * VOCAB * piece)
    loop = make_loop(chunked_prefill_size=chunk)
    tokens = prompt(17)
    loop.add(request(1, tokens, 2, prompt_logprobs=3, logprobs=2))
    loop.add(request(2, prompt(9, 5), 6))
    loop.run()
    loop.check_answer(1)
    loop.check_answer(2)
    scores = loop.outputs[1][0].prompt_logprobs
    assert len(scores) == 17
    assert scores[0] is None
    likeliest = torch.log_softmax(torch.tensor([LOGIT] + [0.0] * (VOCAB - 1)), 0)
    for index in range(1, 17):
        best = next_token(enumerate(tokens[:index]))
        score = scores[index]
        assert score.token_id == tokens[index]
        assert score.top_ids[0] == best
        assert len(score.top_ids) == len(score.top_logprobs) == 3
        assert score.rank == (1 if tokens[index] == best else 2)
        assert score.logprob == pytest.approx(likeliest[0 if tokens[index] == best else 1].item())


def test_each_row_gets_the_logprobs_that_it_asked_for():
    loop = make_loop()
    counts = {1: 3, 2: None, 3: 0, 4: 1}
    for index, count in counts.items():
        loop.add(request(index, prompt(4 + index, index), 5, logprobs=count))
    loop.run()
    for index, count in counts.items():
        loop.check_answer(index)
        entries = [entry for output in loop.outputs[index] for entry in output.logprobs]
        if count is None:
            assert entries == []
            continue
        assert [entry.token_id for entry in entries] == loop.tokens[index]
        assert all(len(entry.top_ids) == count and entry.rank == 1 for entry in entries)
        if count:
            assert all(entry.top_ids[0] == entry.token_id and entry.top_logprobs[0] == entry.logprob for entry in entries)


def sampled_request(request_id, tokens, max_tokens, **params):
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    return Request(id=request_id, prompt_token_ids=tokens, sampling=sampling, arrival_time=0.0)


def run_sampled(requests, **changes):
    loop = make_loop(**changes)
    for asked in requests:
        loop.add(asked)
    loop.run()
    loop.check_at_rest()
    return loop


def test_a_seed_gives_the_same_tokens_in_any_row_and_after_preemption():
    def seeded(request_id, seed):
        return sampled_request(request_id, prompt(6), 30, seed=seed, temperature=1.0, repetition_penalty=1.2)

    alone = run_sampled([seeded(1, 7)]).tokens[1]
    other = run_sampled([seeded(1, 8)]).tokens[1]
    assert len(set(alone)) > 5
    assert alone != other
    crowd = [request(10 + i, prompt(3 + i, i), 20) for i in range(3)]
    batched = run_sampled([*crowd, seeded(1, 7), seeded(2, 8), seeded(3, 7)], num_pages=60)
    assert batched.tokens[1] == batched.tokens[3] == alone
    assert batched.tokens[2] == other
    tight = run_sampled([request(10, prompt(5, 3), 50), seeded(1, 7)], num_pages=16)
    assert tight.scheduler.stats().num_preemptions >= 1
    assert tight.tokens[1] == alone


def test_a_slot_does_not_inherit_from_its_last_user():
    biased = sampled_request(1, prompt(4), 6, seed=1, temperature=0.0, logit_bias={3: 100.0})
    loop = run_sampled([biased, request(2, prompt(9), 6)], max_num_seqs=1)
    assert loop.tokens[1] == [3] * 6
    loop.check_answer(2)


def test_stop_ids_cannot_be_sampled_before_min_tokens():
    free = run_sampled([request(1, prompt(5), 12)]).tokens[1]
    held = run_sampled([request(1, prompt(5), 12, stop=tuple(set(free)), min_tokens=4)])
    assert not set(held.tokens[1][:4]) & set(free)
    assert len(held.tokens[1]) >= 5


def test_a_nan_row_ends_its_request_alone_and_is_counted():
    model = PrefixModel()
    limits = make_limits()
    loop = Loop(limits, make_runner(limits, model))
    tokens = [t % 40 for t in prompt(9)]
    model.poisoned = {49}
    loop.add(request(1, tokens, 1))
    loop.run()
    broken = [*tokens[:5], 49, *tokens[5:]]
    loop.add(request(2, broken, 5))
    loop.add(request(3, tokens, 1))
    loop.run()
    assert loop.reasons[2] is FinishReason.ERROR
    assert "not a number" in loop.outputs[2][-1].error
    assert loop.tokens[2] == []
    loop.check_answer(3)
    assert 1 <= loop.scheduler.stats().nan_rows <= 2  # the step that was in flight when the first was read has one too
    loop.check_at_rest()
    loop.add(request(4, tokens, 3))  # may get the same slot
    loop.run()
    loop.check_answer(4)


def test_a_single_logit_that_is_no_number_ends_the_request(monkeypatch):
    compute_logits = PrefixModel.compute_logits

    def spoil(self, hidden):
        logits = compute_logits(self, hidden)
        logits[:, 17] = torch.nan
        return logits

    monkeypatch.setattr(PrefixModel, "compute_logits", spoil)
    loop = make_loop()
    loop.add(request(1, prompt(5), 4))
    loop.run()
    assert loop.reasons[1] is FinishReason.ERROR
    assert loop.scheduler.stats().nan_rows >= 1


def test_the_variant_follows_the_rows_of_the_step(monkeypatch):
    variants = []

    def record(logits, slots, state, variant):
        variants.append(variant)
        return sample(logits, slots, state, variant)

    monkeypatch.setattr(model_runner, "sample", record)
    run_sampled([sampled_request(1, prompt(4), 2, seed=1), request(2, prompt(5), 4)], max_num_seqs=2)
    assert variants == ["general", "general", "argmax", "argmax"]
    variants.clear()
    run_sampled([sampled_request(1, prompt(4), 2, seed=1), request(2, prompt(5), 2)], max_num_seqs=1)
    assert variants == ["general", "general", "argmax", "argmax"]


def test_scores_of_the_later_part_of_a_row():
    """What a preempted request has scored before is not scored again."""
    runner = make_runner(make_limits(page_size=8, num_pages=8))
    row = ScheduledRow(
        request_id=1, slot=0, start=0, num_tokens=6, token_ids=(1, 2, 3, 4, 5, 6), new_pages=(1,),
        scored_ids=(5, 6), scored_offset=3, scored_top=1,
    )  # fmt: skip
    other = ScheduledRow(request_id=2, slot=1, start=0, num_tokens=2, token_ids=(9, 9), new_pages=(2,))
    step = ScheduledStep(number=1, rows=(other, row), num_decode_rows=0, num_tokens=8)
    scored = runner.launch(step).result().rows[1].scored
    assert [entry.token_id for entry in scored] == [5, 6]
    assert [entry.top_ids[0] for entry in scored] == [next_token(enumerate([1, 2, 3, 4])), next_token(enumerate([1, 2, 3, 4, 5]))]


def test_parameters_that_the_sampler_refuses_end_that_request_alone(monkeypatch):
    set_slot = SamplerState.set_slot

    def refuse(self, slot, params, *rest):
        if params.seed == 13:
            raise ValueError("thirteen")
        set_slot(self, slot, params, *rest)

    monkeypatch.setattr(SamplerState, "set_slot", refuse)
    loop = make_loop()
    loop.add(request(1, prompt(5), 6))
    loop.add(sampled_request(2, prompt(7), 6, seed=13))
    loop.add(request(3, prompt(6), 6))
    loop.run()
    loop.check_answer(1)
    loop.check_answer(3)
    assert loop.reasons[2] is FinishReason.ERROR
    assert "thirteen" in loop.outputs[2][-1].error
    loop.check_at_rest()


def test_decode_steps_are_counted_as_eager_with_their_reason():
    loop = make_loop(chunked_prefill_size=8)
    loop.add(request(1, prompt(6), 8))
    loop.turn()
    loop.turn()
    loop.add(request(2, prompt(20), 3))
    loop.run()
    stats = loop.scheduler.stats()
    assert stats.mixed_steps + stats.eager_decode_steps["cpu"] == stats.steps
    assert stats.mixed_steps >= 3
    assert stats.graph_replays == {}


def decode_step(number, runner_rows):
    rows = tuple(
        ScheduledRow(request_id=slot, slot=slot, start=start, num_tokens=1, table_offset=1, samples=True)
        for slot, start in runner_rows
    )
    return ScheduledStep(number=number, rows=rows, num_decode_rows=len(rows), num_tokens=len(rows))


def prepared_runner():
    """Three requests of 3, 1 and 5 tokens, each with its first token sampled."""
    runner = make_runner(make_limits(page_size=8, num_pages=8, max_model_len=64))
    prompts = {0: (4, 5, 6), 1: (9,), 3: (1, 2, 3, 4, 5)}
    sampling = SamplingParams(max_tokens=9, seed=0, temperature=0.0)
    rows = tuple(
        ScheduledRow(
            request_id=slot, slot=slot, start=0, num_tokens=len(tokens), token_ids=tokens, new_pages=(slot + 1,), samples=True,
            setup=SlotSetup(sampling, list(tokens)),
        )
        for slot, tokens in prompts.items()
    )  # fmt: skip
    result = runner.launch(ScheduledStep(number=1, rows=rows, num_decode_rows=0, num_tokens=9)).result()
    first = [row.token_id for row in result.rows]
    return runner, [(0, 3), (1, 1), (3, 5)], [(*tokens, token) for tokens, token in zip(prompts.values(), first, strict=True)]


@pytest.mark.parametrize("padded", [3, 4])
def test_padding_rows_change_nothing(padded):
    runner, rows, prefixes = prepared_runner()
    staged = runner.batches.stage(decode_step(2, rows), padded=padded)
    batch = runner.batches.to_device(staged)
    assert batch.decodes_only
    assert batch.num_tokens.tolist() == [3]
    assert batch.attention.page_table.shape == (padded, runner.batches.max_pages)
    assert batch.sample_slots.tolist() == [0, 1, 3, 4][:padded]
    assert not batch.attention.page_table[3:].any()
    assert batch.attention.slot_mapping.tolist()[3:] == [0] * (padded - 3)
    assert batch.attention.seq_lens.tolist()[3:] == [1] * (padded - 3)
    assert batch.attention.decode_only
    kept = runner.kv_cache[0][1:].clone()
    with torch.inference_mode():
        sampled = runner.forward_and_sample(batch, None, "argmax")
    assert sampled.tokens.tolist()[:3] == [next_token(enumerate(prefix)) for prefix in prefixes]
    changed = (runner.kv_cache[0][1:] != kept).any(-1).nonzero().tolist()
    assert changed == [[0, 3], [1, 1], [3, 5]]  # one entry for each real row, none for padding but on page 0


def test_a_padded_batch_of_one_size_always_lies_at_the_same_addresses():
    runner, rows, _ = prepared_runner()

    def addresses(step_rows):
        batch = runner.batches.to_device(runner.batches.stage(decode_step(2, step_rows), padded=4))
        attention = batch.attention
        tensors = [batch.positions, batch.sample_slots, batch.num_tokens, attention.query_start_loc, attention.seq_lens]
        return [tensor.data_ptr() for tensor in (*tensors, attention.page_table, attention.slot_mapping)]

    assert addresses(rows) == addresses(rows[:1])
    assert all(address % 64 == 0 for address in addresses(rows))


def test_a_padded_mixed_step_has_its_padding_in_no_row():
    runner, _, prefixes = prepared_runner()
    decoding = ScheduledRow(request_id=1, slot=1, start=1, num_tokens=1, table_offset=1, samples=True)
    reading = ScheduledRow(request_id=2, slot=2, start=0, num_tokens=3, token_ids=(7, 8, 9), new_pages=(6,), samples=True)
    step = ScheduledStep(number=2, rows=(decoding, reading), num_decode_rows=1, num_tokens=4)
    batch = runner.batches.to_device(runner.batches.stage(step, padded=8))
    assert not batch.decodes_only
    assert batch.num_tokens.tolist() == [4]
    assert batch.attention.query_start_loc.tolist() == [0, 1, 4, 4, 4, 4]
    assert batch.attention.seq_lens.tolist() == [2, 3, 0, 0, 0]
    assert batch.attention.slot_mapping.tolist()[4:] == [0] * 4
    assert batch.sample_index.tolist() == [0, 3]
    assert not batch.attention.decode_only
    kept = runner.kv_cache[0][1:].clone()
    with torch.inference_mode():
        runner.fill_in_tokens(batch)
        sampled = runner.forward_and_sample(batch, None, "argmax")
    assert sampled.tokens.tolist() == [next_token(enumerate(prefix)) for prefix in (prefixes[1], (7, 8, 9))]
    changed = (runner.kv_cache[0][1:] != kept).any(-1).nonzero().tolist()
    assert changed == [[1, 1], [5, 0], [5, 1], [5, 2]]


def test_a_full_step_of_single_tokens_does_not_pass_for_decode_rows():
    runner = make_runner(make_limits())
    count = runner.limits.max_num_seqs
    rows = tuple(
        ScheduledRow(request_id=slot, slot=slot, start=0, num_tokens=1, token_ids=(5,), new_pages=(slot + 1,))
        for slot in range(count)
    )
    step = ScheduledStep(number=1, rows=rows, num_decode_rows=0, num_tokens=count)
    assert not runner.batches.to_device(runner.batches.stage(step, padded=count)).attention.decode_only


@pytest.mark.parametrize("padded", [1, 3])
def test_a_step_cannot_be_padded_to_less_than_it_is(padded):
    row = ScheduledRow(request_id=1, slot=0, start=0, num_tokens=4, token_ids=(1, 2, 3, 4), new_pages=(1,))
    runner = make_runner(make_limits())
    with pytest.raises(ValueError, match="padded"):
        runner.batches.stage(ScheduledStep(number=1, rows=(row,), num_decode_rows=0, num_tokens=4), padded=padded)


def test_what_lies_in_shared_pages_is_not_written_again():
    builder = BatchBuilder(max_slots=2, max_tokens=8, max_pages=4, page_size=4, device=torch.device("cpu"))
    row = ScheduledRow(
        request_id=1, slot=1, start=6, num_tokens=4, token_ids=(1, 2, 3, 4), new_pages=(5, 7, 2), write_from=8, samples=True
    )
    batch = builder.to_device(builder.stage(ScheduledStep(number=1, rows=(row,), num_decode_rows=0, num_tokens=4)))
    assert batch.attention.slot_mapping.tolist() == [2, 3, 8, 9]  # the first two on the dummy page
    assert batch.attention.page_table.tolist() == [[5, 7, 2]]
    assert batch.attention.seq_lens.tolist() == [10]
    assert batch.positions.tolist() == [6, 7, 8, 9]
    assert batch.sample_index.tolist() == [3]


def test_a_new_table_forgets_the_old_one():
    builder = BatchBuilder(max_slots=2, max_tokens=8, max_pages=4, page_size=4, device=torch.device("cpu"))

    def table(**fields):
        row = ScheduledRow(request_id=1, slot=0, start=0, num_tokens=1, token_ids=(1,), **fields)
        builder.stage(ScheduledStep(number=1, rows=(row,), num_decode_rows=0, num_tokens=1))
        return builder._tables[0].tolist()

    assert table(new_pages=(5, 7, 2)) == [5, 7, 2, 0]
    assert table(table_offset=3, new_pages=(9,)) == [5, 7, 2, 9]
    assert table(new_pages=(4,)) == [4, 0, 0, 0]


@pytest.mark.parametrize(("chunk", "slots", "longest"), [(16, 4, 64), (64, 4, 8), (2, 4, 64), (16, 1, 64), (7, 3, 3)])
def test_the_trial_step_is_as_large_as_a_step_can_be(chunk, slots, longest):
    limits = make_limits(chunked_prefill_size=chunk, max_num_seqs=slots, max_model_len=longest, num_pages=64)
    step = trial_step(limits)
    possible = min(limits.max_step_tokens, slots * (longest - 1))
    assert step.num_tokens == possible
    assert max(row.num_tokens for row in step.rows) < longest
    assert len({row.slot for row in step.rows}) == len(step.rows)
    runner = make_runner(limits)
    before = runner.kv_cache[0][1:].clone()
    result = runner.launch(step).result()
    assert all(row.error is None and row.token_id is not None and len(row.logprobs.top_ids) == 20 for row in result.rows)
    assert torch.equal(runner.kv_cache[0][1:], before)


def test_the_model_double_and_the_sampler_agree_on_a_row():
    state = SamplerState(2, VOCAB, torch.device("cpu"))
    logits = PrefixModel().compute_logits(torch.tensor([[7.0], [9.0]]))
    assert sample(logits, torch.tensor([0, 1]), state, "argmax").tolist() == [7, 9]
    assert SHAPE.head_dim + SHAPE.rope_dim == 2
