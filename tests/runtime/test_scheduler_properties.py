"""Any order of arrivals, aborts and finishes: pages are never shared wrongly, never leaked, and no answer changes."""

from __future__ import annotations

import collections

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from runtime.scripted import Loop, make_limits, next_token, request, score

from minserve.request import FinishReason

FEW_PROMPTS = [[i % 7 for i in range(start, start + 40)] for start in range(3)]
"""Prompts are cut from these, so that long common prefixes are the rule."""


class EngineLoop(RuleBasedStateMachine):
    loop: Loop

    @initialize(
        page_size=st.sampled_from([1, 2, 3, 4, 8]),
        spare=st.integers(0, 20),
        chunk=st.sampled_from([1, 2, 3, 7, 16]),
        slots=st.integers(1, 5),
        caching=st.booleans(),
    )
    def start(self, page_size, spare, chunk, slots, caching):
        max_model_len = 48
        self.limits = make_limits(
            page_size=page_size,
            num_pages=-(-max_model_len // page_size) + spare,
            max_model_len=max_model_len,
            chunked_prefill_size=chunk,
            max_num_seqs=slots,
            enable_prefix_caching=caching,
        )
        self.loop = Loop(self.limits)
        self.count = 0
        self.dropped: set[int] = set()

    def live(self):
        return [i for i in self.loop.requests if i not in self.loop.reasons and i not in self.dropped]

    @rule(
        source=st.sampled_from(FEW_PROMPTS),
        length=st.integers(1, 40),
        max_tokens=st.integers(0, 40),
        stops=st.sets(st.integers(0, 49), max_size=3),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        min_tokens=st.integers(0, 4),
        broken=st.integers(-800, 48),
    )
    def arrive(self, source, length, max_tokens, stops, prompt_logprobs, min_tokens, broken):
        self.count += 1
        if broken > 0:
            self.loop.runner.failing[self.count] = broken
        stop = tuple(sorted(stops))
        self.loop.add(request(self.count, source[:length], max_tokens, stop, prompt_logprobs, min_tokens))

    @precondition(lambda self: self.loop.requests)
    @rule(turns=st.integers(1, 12))
    def turn(self, turns):
        for _ in range(turns):
            self.loop.turn()
            self.pages_have_the_users_they_count()

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def drop(self, data):
        request_id = data.draw(st.sampled_from(self.live()))
        self.dropped.add(request_id)
        self.loop.drop(request_id)

    @rule()
    def flush(self):
        self.loop.scheduler.pages.flush()

    @invariant()
    def pages_have_the_users_they_count(self):
        scheduler = self.loop.scheduler
        users = collections.Counter(page for s in scheduler._sequences.values() for page in s.pages)
        users.update(page for _, pages, _ in scheduler._leaving for page in pages)
        allocator = scheduler.pages
        assert all(allocator._users[page] == users[page] for page in range(1, self.limits.num_pages + 1))
        assert users[0] == 0
        free, idle = set(allocator._free), set(allocator.cache._idle)
        assert len(free) == len(allocator._free)
        assert not free & idle
        assert free | idle == {page for page in range(1, self.limits.num_pages + 1) if users[page] == 0}
        assert not any(page in allocator.cache for page in free)
        for sequence in scheduler._sequences.values():
            assert len(set(sequence.pages)) == len(sequence.pages)
        slots = [s.slot for s in scheduler._sequences.values() if s.slot is not None]
        slots += [slot for *_, slot in scheduler._leaving if slot is not None]
        assert sorted(slots + scheduler._free_slots) == list(range(self.limits.max_num_seqs))

    def teardown(self):
        if not hasattr(self, "loop"):
            return
        self.loop.run()
        for request_id, asked in self.loop.requests.items():
            if request_id in self.dropped:
                assert request_id not in self.loop.reasons or self.loop.reasons[request_id] is not None
            elif self.loop.reasons[request_id] is FinishReason.ERROR:
                assert request_id in self.loop.runner.failing
            else:
                self.loop.check_answer(request_id)
                self.check_scores(asked)
        self.loop.check_at_rest()

    def check_scores(self, asked):
        first = self.loop.outputs[asked.id][0]
        if asked.sampling.prompt_logprobs is None:
            assert first.prompt_logprobs is None
            return
        tokens = asked.prompt_token_ids
        assert first.prompt_logprobs == (None, *(score(enumerate(tokens[:i]), tokens[i]) for i in range(1, len(tokens))))


TestEngineLoop = EngineLoop.TestCase
TestEngineLoop.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_the_reference_depends_on_every_token():
    assert len({next_token(enumerate([1, 2, 3, x])) for x in range(50)}) > 20
