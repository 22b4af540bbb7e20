"""Which rank gets a request: work, pages and the prompt's beginning in one balance."""

from __future__ import annotations

import random

from minserve.messages import StepStats
from minserve.server.balancer import Balancer

IDLE = StepStats()


def balancer(num_ranks: int = 3, num_pages: int = 100) -> Balancer:
    made = Balancer(num_ranks)
    made.know_pages([num_pages] * num_ranks, 64)
    return made


def tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=count)


def test_a_session_stays_where_its_pages_are() -> None:
    """Every turn repeats the ones before it; ten sessions, on three ranks that are idle between turns."""
    ranks = balancer()
    sessions = {number: tokens(200, number) for number in range(10)}
    homes: dict[int, int] = {}
    for number, prompt in sessions.items():
        homes[number] = ranks.choose(prompt, [IDLE] * 3)
        ranks.add(homes[number], len(prompt))
    assert sorted(homes.values()) == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    for number, prompt in sessions.items():
        ranks.remove(homes[number], len(prompt))
    for turn in range(5):
        for number, prompt in sessions.items():
            prompt += tokens(80, 100 * turn + number)
            assert ranks.choose(prompt, [IDLE] * 3) == homes[number]


def test_a_rank_with_too_much_work_loses_its_sessions() -> None:
    ranks = balancer()
    prompt = tokens(640)
    home = ranks.choose(prompt, [IDLE] * 3)
    for _ in range(3):
        ranks.add(home, 1000)
    elsewhere = ranks.choose([*prompt, 1], [IDLE] * 3)
    assert elsewhere != home
    # There it is now, too, and there it stays.
    for _ in range(3):
        ranks.remove(home, 1000)
    assert ranks.choose([*prompt, 2], [IDLE] * 3) == elsewhere


def test_only_whole_pages_from_the_beginning_count() -> None:
    ranks = balancer(2)
    prompt = tokens(64 * 4)
    assert ranks.choose(prompt, [IDLE] * 2) == 0
    ranks.add(0, 0)
    assert ranks.choose([-1, *prompt], [IDLE] * 2) == 1
    assert ranks.choose(prompt[:63], [IDLE] * 2) == 1
    ranks.remove(0, 0)
    ranks.add(1, 0)
    ranks.add(0, 0)
    ranks.add(0, 100 - 64 * 4)
    assert ranks.choose(prompt[:128], [IDLE] * 2) == 0


def test_what_other_fronts_sent_and_full_caches_count() -> None:
    ranks = balancer(3, num_pages=10)
    assert ranks.choose([], [StepStats(num_running=2, num_waiting=1), StepStats(num_running=2), IDLE]) == 2
    # Rank 2 has one sequence more, but the others lack the pages.
    ranks.add(2, 0)
    full = StepStats(used_pages=9)
    assert ranks.choose(tokens(250), [full, full, StepStats(num_running=1)]) == 2


def test_memory_of_prompts_is_bounded() -> None:
    ranks = balancer(2)
    ranks.MOST_PAGES = 20
    for seed in range(50):
        ranks.choose(tokens(64 * 3, seed), [IDLE] * 2)
    assert len(ranks._home) == 20


def test_the_prompt_of_a_rank_alone_is_not_even_looked_at() -> None:
    assert Balancer(1).choose(range(10**9)) == 0
