"""The soak's kinds of requests do what they say to a real server, and its verdict sees what grew."""

from __future__ import annotations

import asyncio
import random

import aiohttp
import pytest

from tools import soak
from tools.launched import Reading, growth, serving

CALM = Reading(files=12, megabytes=100.0, engine_megabytes=500.0, pages=0.0, running=0.0)


def test_every_kind_is_answered_as_it_should_be() -> None:
    async def all_kinds(port: int) -> None:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", headers={"Content-Type": "application/json"}) as session:
            for seed in range(4):
                await asyncio.gather(*(kind.act(session, random.Random(seed)) for kind in soak.KINDS))

    with serving(["--num-pages", "400"]) as server:
        asyncio.run(all_kinds(server.port))
        assert server.errors() == []
        assert server.settle()._replace(files=0, megabytes=0, engine_megabytes=0) == Reading(0, 0, 0, 0.0, 0.0)


def test_an_answer_of_another_status_is_a_surprise() -> None:
    async def act(port: int) -> None:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            await soak.post(session, "/v1/completions", {"prompt": "x", "temperature": 7})

    with serving(["--mock-engine", "0"]) as server, pytest.raises(soak.Surprise, match="answered 400, not 200"):
        asyncio.run(act(server.port))


def test_growth_after_the_warm_up_is_found() -> None:
    filling = [CALM._replace(engine_megabytes=100.0 * n) for n in range(1, 6)]
    assert growth(filling + [CALM] * 10, 1.01) == []
    assert growth([CALM] * 12 + [CALM._replace(files=13)] * 3, 1.01) == ["files grew from 12.0 to 13.0"]
    leaking = [CALM._replace(megabytes=100.0 + n) for n in range(30)]
    assert growth(leaking, 1.01) == ["megabytes grew from 112.5 to 126.5"]
    assert growth(leaking, 1.2) == []
    (found,) = growth([CALM] * 9 + [CALM._replace(pages=0.01)], 1.01)
    assert found.startswith("reading 9: something still runs or holds pages")
