"""The scheduler's choices and bookkeeping, with a model double that reads every token through its page."""

from __future__ import annotations

import random

import pytest
from runtime.scripted import Loop, expected, make_limits, next_token, request, score

from minserve.request import FinishReason


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{seed}/{length}").choices(range(50), k=length)


def run_alone(asked, **changes):
    loop = Loop(make_limits(**changes))
    loop.add(asked)
    loop.run()
    loop.check_at_rest()
    return loop


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 17, 40])
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 16, 64])
def test_every_chunk_size_gives_the_same_tokens(length, chunk):
    loop = run_alone(request(1, prompt(length), 11), chunked_prefill_size=chunk)
    loop.check_answer(1)
    assert all(step.num_tokens <= max(chunk, 4) for step in loop.runner.steps)


@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 5, 16])
def test_strangers_in_the_batch_change_nothing(chunk, max_num_seqs):
    loop = Loop(make_limits(chunked_prefill_size=chunk, max_num_seqs=max_num_seqs, num_pages=200))
    for index in range(12):
        loop.add(request(index, prompt(3 * index + 1, index), 5 + index))
    loop.run()
    for index in range(12):
        loop.check_answer(index)
    loop.check_at_rest()


@pytest.mark.parametrize("shared", [1, 3, 4, 5, 7, 8, 9, 12, 20])
@pytest.mark.parametrize("extra", [0, 1, 4])
def test_prefix_hits_of_any_length_change_nothing(shared, extra):
    loop = Loop(make_limits())
    first = prompt(shared)
    loop.add(request(1, first, 6))
    loop.run()
    second = first + prompt(extra, seed=9)
    loop.add(request(2, second, 6))
    loop.run()
    loop.check_answer(1)
    loop.check_answer(2)
    whole_pages = shared // 4 * 4
    assert loop.outputs[2][0].cached_tokens == min(whole_pages, len(second) - 1)
    assert loop.outputs[1][0].cached_tokens == 0
    stats = loop.scheduler.stats()
    assert stats.prefix_cache_queries == len(first) + len(second)
    assert stats.prefix_cache_hits == min(whole_pages, len(second) - 1)
    loop.check_at_rest()


def test_a_prompt_of_exactly_one_page_twice_computes_its_last_token_again():
    loop = Loop(make_limits())
    for index in (1, 2):
        loop.add(request(index, prompt(4), 1))
        loop.run()
        loop.check_answer(index)
    again = loop.runner.steps[-1].rows[0]
    assert (again.start, again.num_tokens, again.write_from) == (3, 1, 4)


def test_output_pages_serve_the_next_turn_of_a_conversation():
    loop = Loop(make_limits())
    loop.add(request(1, prompt(6), 11))
    loop.run()
    turn = prompt(6) + loop.tokens[1] + [7, 7]
    loop.add(request(2, turn, 3))
    loop.run()
    loop.check_answer(2)
    assert loop.outputs[2][0].cached_tokens == 16  # 16 of the 17 tokens were computed, the last one never is


def test_a_shared_page_is_never_written_by_its_second_user():
    loop = Loop(make_limits())
    loop.add(request(1, prompt(8), 20))
    for _ in range(4):
        loop.turn()
    loop.add(request(2, prompt(8), 20))
    loop.run()
    loop.check_answer(1)
    loop.check_answer(2)
    rows = [row for step in loop.runner.steps for row in step.rows if row.request_id == 2]
    assert rows[0].write_from == 8
    assert rows[0].start == 7
    shared = next(row for step in loop.runner.steps for row in step.rows if row.request_id == 1).new_pages[:2]
    assert rows[0].new_pages[:2] == shared


def test_the_cache_can_be_switched_off():
    loop = Loop(make_limits(enable_prefix_caching=False))
    for index in (1, 2):
        loop.add(request(index, prompt(9), 3))
        loop.run()
        loop.check_answer(index)
        assert loop.outputs[index][0].cached_tokens == 0
    assert loop.scheduler.stats().prefix_cache_queries == 0
    assert loop.scheduler.pages.cache.num_idle == 0


def test_flush_drops_idle_pages_only():
    loop = Loop(make_limits())
    loop.add(request(1, prompt(8), 1))
    loop.run()
    loop.add(request(2, prompt(12, seed=5), 8))
    for _ in range(3):
        loop.turn()
    assert loop.scheduler.pages.flush() == 2
    loop.add(request(3, prompt(12, seed=5), 2))
    loop.add(request(4, prompt(8), 2))
    loop.run()
    for index in (2, 3, 4):
        loop.check_answer(index)
    assert loop.outputs[3][0].cached_tokens == 11
    assert loop.outputs[4][0].cached_tokens == 0
    loop.check_at_rest()


def test_idle_pages_are_evicted_from_the_end_of_the_oldest_prefix():
    loop = Loop(make_limits(num_pages=6, max_model_len=20))
    loop.add(request(1, prompt(16), 1))  # leaves four idle pages
    loop.run()
    loop.add(request(2, prompt(12, seed=3), 1))  # takes the two free ones and the last of the four
    loop.run()
    loop.add(request(3, prompt(16), 1))
    loop.run()
    assert loop.outputs[3][0].cached_tokens == 12
    for index in (1, 2, 3):
        loop.check_answer(index)


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("num_pages", [16, 18, 24])
def test_memory_for_one_and_a_half_requests_ends_both(num_pages, caching):
    limits = make_limits(num_pages=num_pages, enable_prefix_caching=caching)
    loop = Loop(limits)
    loop.add(request(1, prompt(5, 1), 59))
    loop.add(request(2, prompt(6, 2), 58))
    loop.run()
    loop.check_answer(1)
    loop.check_answer(2)
    stats = loop.scheduler.stats()
    assert 1 <= stats.num_preemptions <= 4
    assert stats.used_pages == 0
    loop.check_at_rest()


@pytest.mark.parametrize("length", range(1, 14))
def test_a_preemption_at_every_length_keeps_the_newest_token(length):
    """The younger request is thrown out just when its step is in flight, and again when it is not."""
    for older_growth in range(1, 6):
        loop = Loop(make_limits(num_pages=8, max_model_len=32, enable_prefix_caching=older_growth % 2 == 0))
        loop.add(request(1, prompt(older_growth, 1), 32 - older_growth))
        loop.add(request(2, prompt(length, 2), 18))
        loop.run()
        loop.check_answer(1)
        loop.check_answer(2)
        assert loop.scheduler.stats().num_preemptions >= 1
        loop.check_at_rest()


def test_the_work_thrown_away_stays_small():
    """A full house and a long queue: who is let in has room to get on, the more so after it was thrown out before."""
    loop = Loop(
        make_limits(num_pages=60, max_model_len=200, chunked_prefill_size=64, max_num_seqs=16, enable_prefix_caching=False)
    )
    for index in range(40):
        loop.add(request(index, prompt(20, index), random.Random(index).randrange(20, 170)))
    loop.run()
    for index in range(40):
        loop.check_answer(index)
    needed = sum(20 + len(tokens) - 1 for tokens in loop.tokens.values())
    spent = sum(step.num_tokens for step in loop.runner.steps)
    assert needed < spent < 1.7 * needed
    assert loop.scheduler.stats().num_preemptions < 66  # 93 when anyone who fits is let in


def test_the_youngest_is_preempted_and_the_oldest_never():
    loop = Loop(make_limits(num_pages=16, max_num_seqs=3))
    for index in range(3):
        loop.add(request(index, prompt(10, index), 50))
    loop.run()
    for index in range(3):
        loop.check_answer(index)
    firsts = [
        sum(row.table_offset == 0 for step in loop.runner.steps for row in step.rows if row.request_id == i) for i in range(3)
    ]
    assert firsts[0] == 1
    assert sum(firsts) == 3 + loop.scheduler.stats().num_preemptions
    setups = [row.request_id for step in loop.runner.steps for row in step.rows if row.setup is not None]
    assert sorted(setups) == [0, 1, 2], "a slot is for life: its sampling state survives a preemption"
    slots = [{row.slot for step in loop.runner.steps for row in step.rows if row.request_id == i} for i in range(3)]
    assert all(len(used) == 1 for used in slots)


def test_a_preempted_request_reports_its_cached_tokens_as_they_were_when_it_first_answered():
    loop = Loop(make_limits(num_pages=8, max_model_len=32))
    loop.add(request(1, prompt(5, 1), 27))
    loop.add(request(2, prompt(6, 2), 20))
    loop.run()
    assert loop.scheduler.stats().num_preemptions
    assert [output.cached_tokens for output in loop.outputs[2]] == [0] * 20
    assert loop.scheduler.stats().prefix_cache_queries == 11


@pytest.mark.parametrize("turns", range(13))
@pytest.mark.parametrize("caching", [False, True])
def test_an_abort_at_any_moment_returns_every_page(turns, caching):
    """Ten chunks of prompt, then decode: ended by the front at every turn, with a neighbour that must not notice."""
    loop = Loop(make_limits(chunked_prefill_size=4, enable_prefix_caching=caching))
    loop.add(request(1, prompt(40), 9))
    for _ in range(turns):
        loop.turn()
    loop.drop(1)
    loop.turn()
    loop.turn()
    loop.check_at_rest()
    loop.add(request(2, prompt(40), 9))
    loop.run()
    loop.check_answer(2)
    assert 1 not in loop.reasons
    loop.check_at_rest()


def test_pages_of_an_aborted_request_come_back_when_its_step_has_retired_and_not_before():
    loop = Loop(make_limits(enable_prefix_caching=False))
    loop.add(request(1, prompt(12), 9))
    loop.turn()
    loop.drop(1)
    assert loop.scheduler.stats().used_pages == 3
    loop.turn()
    assert loop.scheduler.stats().used_pages == 0


def test_there_is_room_until_the_prompts_that_are_there_fill_a_step():
    loop = Loop(make_limits(num_pages=64, max_num_seqs=2))
    assert loop.scheduler.has_room
    loop.add(request(1, range(15), 4))
    assert loop.scheduler.has_room
    loop.add(request(2, range(1), 4))
    assert not loop.scheduler.has_room  # 16 tokens are a step's most
    loop.turn()
    assert loop.scheduler.has_room
    loop.add(request(3, range(20), 4))
    assert not loop.scheduler.has_room
    loop.run()
    assert loop.scheduler.has_room


def test_an_unknown_id_is_no_news():
    loop = Loop(make_limits())
    loop.drop(77)
    loop.add(request(1, prompt(3), 2))
    loop.run()
    loop.drop(1)
    loop.check_answer(1)


def test_a_stop_token_ends_a_request_and_the_step_in_flight_is_dropped():
    free, _ = expected(request(1, prompt(5), 20), 64)
    stop = free[6]
    first = free.index(stop)
    loop = run_alone(request(1, prompt(5), 20, stop=(stop,)))
    assert loop.tokens[1] == free[: first + 1]
    assert loop.reasons[1] is FinishReason.STOP
    assert len([row for step in loop.runner.steps for row in step.rows if row.samples]) == first + 2


def test_a_length_finish_is_foreseen():
    loop = run_alone(request(1, prompt(5), 7))
    loop.check_answer(1)
    assert sum(len(step.rows) for step in loop.runner.steps) == 7


def test_stop_tokens_wait_for_min_tokens():
    free, _ = expected(request(1, prompt(5), 20), 64)
    loop = run_alone(request(1, prompt(5), 20, stop=(free[2],), min_tokens=3))
    assert len(loop.tokens[1]) > 3


@pytest.mark.parametrize(("length", "reason"), [(63, FinishReason.LENGTH), (64, FinishReason.ERROR), (65, FinishReason.ERROR)])
def test_the_edge_of_the_context(length, reason):
    loop = run_alone(request(1, prompt(length), 10), num_pages=16)
    assert loop.reasons[1] is reason
    assert len(loop.tokens[1]) == (1 if reason is FinishReason.LENGTH else 0)


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_no_output_tokens_means_the_prompt_alone(chunk):
    loop = run_alone(request(1, prompt(9), 0, prompt_logprobs=1), chunked_prefill_size=chunk)
    assert loop.tokens[1] == []
    assert loop.reasons[1] is FinishReason.LENGTH
    assert len(loop.outputs[1]) == 1
    check_scores(loop, 1)


def check_scores(loop, request_id):
    tokens = loop.requests[request_id].prompt_token_ids
    wanted = (None, *(score(enumerate(tokens[:i]), tokens[i]) for i in range(1, len(tokens))))
    answers = [output.prompt_logprobs for output in loop.outputs[request_id]]
    assert answers[0] == wanted
    assert answers[1:] == [None] * (len(answers) - 1)


@pytest.mark.parametrize("length", [1, 2, 4, 9])
@pytest.mark.parametrize("chunk", [1, 2, 3, 64])
def test_prompt_scores_do_not_use_the_cache_and_do_not_depend_on_chunks(length, chunk):
    loop = Loop(make_limits(chunked_prefill_size=chunk))
    for index in (1, 2):
        loop.add(request(index, prompt(length), 3, prompt_logprobs=0))
        loop.run()
        loop.check_answer(index)
        check_scores(loop, index)
        assert loop.outputs[index][0].cached_tokens == 0
    loop.check_at_rest()


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 9])
def test_prompt_scores_survive_preemption_while_the_prompt_is_read(chunk):
    for caching in (False, True):
        loop = Loop(make_limits(num_pages=9, max_model_len=36, chunked_prefill_size=chunk, enable_prefix_caching=caching))
        loop.add(request(1, prompt(2, 1), 34))
        for _ in range(8):
            loop.turn()
        loop.add(request(2, prompt(18, 2), 4, prompt_logprobs=0))
        loop.run()
        for index in (1, 2):
            loop.check_answer(index)
        check_scores(loop, 2)
        loop.check_at_rest()


def test_prompts_never_hold_up_decode():
    loop = Loop(make_limits(num_pages=200, chunked_prefill_size=8))
    loop.add(request(1, prompt(3), 30))
    loop.turn()
    loop.turn()
    for index in (2, 3):
        loop.add(request(index, prompt(60, index), 2))
    loop.run()
    carrying = [any(row.request_id == 1 for row in step.rows) for step in loop.runner.steps]
    assert carrying[:30] == [True] * 30
    mixed = [step for step in loop.runner.steps if 0 < step.num_decode_rows < len(step.rows)]
    assert mixed
    assert loop.scheduler.stats().mixed_steps == sum(step.num_decode_rows < len(step.rows) for step in loop.runner.steps)


def test_a_short_prompt_is_not_held_up_by_long_ones():
    loop = Loop(make_limits(num_pages=400, chunked_prefill_size=8, max_model_len=400, max_num_seqs=8))
    for index in (1, 2):
        loop.add(request(index, prompt(300, index), 2))
    for _ in range(5):
        loop.turn()
    loop.add(request(3, prompt(6, 3), 1))
    for _ in range(4):
        loop.turn()
    assert loop.reasons.get(3) is FinishReason.LENGTH
    loop.run()
    for index in (1, 2, 3):
        loop.check_answer(index)


def test_short_prompts_do_not_starve_a_long_one():
    loop = Loop(make_limits(num_pages=400, chunked_prefill_size=8, max_model_len=400, max_num_seqs=8))
    loop.add(request(0, prompt(200), 1))
    for index in range(1, 200):
        loop.add(request(index, prompt(6, index), 1))
        loop.turn()
        if 0 in loop.reasons:
            break
    assert index < 60  # at least half of the budget: 200 tokens in 50 steps
    loop.run()
    loop.check_answer(0)


def test_equal_prompts_are_read_in_their_order():
    loop = Loop(make_limits(num_pages=200, chunked_prefill_size=16, max_num_seqs=8))
    for index in range(6):
        loop.add(request(index, prompt(16, index), 1))
    loop.run()
    assert list(loop.reasons) == [0, 1, 2, 3, 4, 5]
    assert len(loop.runner.steps) == 6


@pytest.mark.parametrize("length", [1, 9, 12, 15])
def test_one_bad_row_ends_its_request_alone_and_its_pages_are_not_trusted(length):
    loop = Loop(make_limits(chunked_prefill_size=4))
    loop.runner.failing[2] = length
    for index in (1, 2, 3):
        loop.add(request(index, prompt(12, index), 6))
    loop.run()
    loop.check_answer(1)
    loop.check_answer(3)
    assert loop.reasons[2] is FinishReason.ERROR
    assert loop.outputs[2][-1].error == "broken on purpose"
    loop.add(request(4, prompt(12, 2), 6))
    loop.run()
    loop.check_answer(4)
    assert loop.outputs[4][0].cached_tokens == 0
    loop.check_at_rest()


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "word"),
    [([], 3, "empty"), ([50], 3, "vocabulary"), ([-1], 3, "vocabulary"), ([1], -1, "max_tokens")],
)
def test_what_the_front_should_have_refused_ends_that_request_alone(tokens, max_tokens, word):
    loop = Loop(make_limits())
    loop.add(request(1, prompt(5), 3))
    loop.add(request(2, tokens, max_tokens))
    loop.run()
    loop.check_answer(1)
    assert loop.reasons[2] is FinishReason.ERROR
    assert word in loop.outputs[2][0].error
    loop.check_at_rest()


def test_an_id_in_use_is_refused():
    loop = Loop(make_limits())
    loop.add(request(1, prompt(5), 3))
    refusal = loop.scheduler.add(request(1, prompt(6), 3))
    assert refusal.finish_reason is FinishReason.ERROR


def test_the_double_is_sharp():
    """A page table with two pages swapped gives other tokens, so the tests above can fail."""
    loop = Loop(make_limits())
    loop.add(request(1, prompt(12), 6))
    loop.turn()
    loop.turn()
    table = loop.runner.tables[loop.runner.steps[0].rows[0].slot]
    table[0], table[1] = table[1], table[0]
    loop.run()
    assert loop.tokens[1] != expected(loop.requests[1], 64)[0]
    assert next_token([1, 2]) != next_token([2, 1])


def test_a_limit_for_one_step_cuts_prompts_and_no_decode_row():
    loop = Loop(make_limits(chunked_prefill_size=64))

    def step(most=None):
        made = loop.scheduler.schedule(0.0, most)
        loop.scheduler.retire(made, loop.runner.launch(made).result())
        return made

    for number in range(3):
        loop.add(request(number, prompt(4, number), 20))
    step()
    loop.add(request(3, prompt(30, 9), 2))
    for most, read in ((3, 0), (2, 0), (8, 5), (None, 25)):
        made = step(most)
        assert (made.num_decode_rows, made.num_tokens - 3) == (3, read), most
