"""The arithmetic eval against servers that are right, wrong, silent, old or not there."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

from minserve.clients.arithmetic_reference import PromptTokens, load_reference
from minserve.clients.eval import run_arithmetic
from minserve.errors import EnvironmentFault, ExitCode, UsageError

REFERENCE = load_reference()
LIMIT = 12


class StoredServer:
    """Answers from the reference file; `change` may spoil an answer, `shift` each log-probability."""

    def __init__(
        self,
        change: Callable[[str], str] = lambda answer: answer,
        shift: float = 0.0,
        prompt_shift: float = 0.0,
        echo: bool = True,
        logprobs: bool = True,
        with_end: bool = True,
        seconds: float = 0.002,
    ) -> None:
        self.change, self.shift, self.prompt_shift = change, shift, prompt_shift
        self.echo, self.logprobs, self.with_end = echo, logprobs, with_end
        self.most_at_once = self.at_once = 0
        self.seconds = seconds
        self.headers: list[str | None] = []
        self.models: set[str] = set()
        tokens = PromptTokens()
        self._items = {json.dumps(item.messages): item for item in REFERENCE.items}
        self._prompts = {(*tokens.of(item)[0], *tokens.of(item)[1]): (item, tokens.of(item)) for item in REFERENCE.items[:LIMIT]}

    async def chat(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(self.seconds)
        self.at_once -= 1
        item = self._items[json.dumps(body["messages"])]
        assert (body["temperature"], body["logprobs"]) == (0, True)
        values = item.log_probabilities if self.with_end else item.log_probabilities[:-1]
        content = [{"token": "", "logprob": value + self.shift / len(values)} for value in values]
        choice = {"message": {"content": self.change(item.answer)}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice | {"logprobs": {"content": content} if self.logprobs else None}]})

    async def completions(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        if not self.echo:
            return web.json_response({"error": {"message": "echo is not supported"}}, status=400)
        if not self.logprobs:
            return web.json_response({"choices": [{"text": "", "logprobs": None}]})
        item, (prompt, _) = self._prompts[tuple(body["prompt"])]
        spread = item.prompt_log_probability / (len(prompt) - 1) + self.prompt_shift
        first, *rest = item.log_probabilities
        values = [None, *[spread] * (len(prompt) - 1), first + self.shift, *rest, -1.0]
        return web.json_response({"choices": [{"logprobs": {"token_logprobs": values}}]})

    async def list_models(self, request: web.Request) -> web.Response:
        del request
        return web.json_response({"object": "list", "data": [{"id": "first"}, {"id": "second"}]})

    async def _body(self, request: web.Request) -> dict[str, Any]:
        self.headers.append(request.headers.get("Authorization"))
        body: dict[str, Any] = await request.json()
        self.models.add(body["model"])
        return body


def run(server: StoredServer, path: str = "", **options: Any) -> tuple[ExitCode, list[str]]:
    """The eval's exit code and its lines."""
    written = io.StringIO()

    async def main() -> ExitCode:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", server.chat)
        app.router.add_post("/v1/completions", server.completions)
        app.router.add_get("/v1/models", server.list_models)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            host, port = runner.addresses[0][:2]
            console = Console(file=written, width=300, highlight=False)
            return await run_arithmetic(f"http://{host}:{port}{path}", limit=LIMIT, console=console, **options)
        finally:
            await runner.cleanup()

    return asyncio.run(main()), written.getvalue().splitlines()


def test_a_right_server_passes() -> None:
    server = StoredServer(seconds=0.1)  # long enough for four to be there at once, on any machine
    code, lines = run(server, concurrency=4)
    assert code is ExitCode.OK
    assert lines[-1] == "accuracy 1.000"
    expected = sum(sum(item.log_probabilities) for item in REFERENCE.items[:LIMIT]) / LIMIT
    assert lines[-2] == f"mean log-probability {expected:.4f} (float32 {expected:.4f}, drift 0.0000, bound 0.01)"
    assert server.most_at_once == 4
    assert server.models == {"first"}
    for part in ("plain", "several", "recall", "turns", "all"):
        assert any(f"│ {part} " in line and line.count("1.000") == 2 for line in lines), part


def test_wrong_answers_count() -> None:
    wrong = REFERENCE.items[0].answer, REFERENCE.items[5].answer
    code, lines = run(StoredServer(change=lambda answer: answer + "0" if answer in wrong else answer))
    assert code is ExitCode.SELF_CHECK
    assert lines[-1] == "accuracy 0.833"


def test_the_worse_concurrency_counts() -> None:
    asked: list[str] = []

    def fails_in_the_second_pass(answer: str) -> str:
        asked.append(answer)
        return answer if len(asked) <= LIMIT else ""

    code, lines = run(StoredServer(change=fails_in_the_second_pass), concurrency=3)
    assert (code, lines[-1]) == (ExitCode.SELF_CHECK, "accuracy 0.000")
    assert any("all" in line and "1.000" in line and "0.000" in line for line in lines)


@pytest.mark.parametrize("shift", [0.03, -0.03, float("nan")])
def test_a_drift_outside_its_bound_fails(shift: float) -> None:
    code, lines = run(StoredServer(shift=shift))
    assert code is ExitCode.SELF_CHECK
    assert [line.rsplit(None, 1)[-1] == "OUTSIDE" for line in lines[-5:]] == [True, True, False, True, False]


def test_a_drift_of_prompts_fails() -> None:
    code, lines = run(StoredServer(prompt_shift=0.03))
    assert code is ExitCode.SELF_CHECK
    assert [line.endswith("OUTSIDE") for line in lines[-5:]] == [False, False, True, False, False]


def test_a_small_drift_passes() -> None:
    code, lines = run(StoredServer(shift=-0.004, prompt_shift=0.004))
    assert code is ExitCode.OK
    assert "drift 0.0040" in lines[-2]


def test_a_server_without_echo_is_told_apart() -> None:
    code, lines = run(StoredServer(echo=False))
    assert code is ExitCode.OK
    assert lines[-1] == "accuracy 1.000"
    assert "echo" in lines[-2]
    assert "answered 400: echo is not supported" in lines[-2]
    assert lines[-3].startswith("generated log-probability, 16 at a time")


def test_a_server_without_logprobs_still_gives_accuracy() -> None:
    code, lines = run(StoredServer(logprobs=False))
    assert code is ExitCode.OK
    assert lines[-1] == "accuracy 1.000"
    assert "no such arrays" in lines[-2]
    assert not any(line.startswith("generated") for line in lines)


def test_a_server_that_does_not_count_the_end_of_the_turn() -> None:
    code, lines = run(StoredServer(with_end=False))
    assert code is ExitCode.OK
    assert any(line.startswith("generated") and "drift 0.0000" in line for line in lines)


def test_base_url_with_v1_key_and_model() -> None:
    server = StoredServer()
    code, _ = run(server, path="/v1/", api_key="secret", model="second", concurrency=1)
    assert code is ExitCode.OK
    assert set(server.headers) == {"Bearer secret"}
    assert server.models == {"second"}
    assert len(server.headers) == 2 * LIMIT  # at concurrency 1 the chat pass runs once


def test_no_server_is_a_sentence() -> None:
    with pytest.raises(EnvironmentFault, match=r"cannot reach http://127\.0\.0\.1:9/v1/models: .*is the server up\?"):
        asyncio.run(run_arithmetic("http://127.0.0.1:9"))


@pytest.mark.parametrize("options", [{"concurrency": 0}, {"limit": 0}])
def test_numbers_below_one_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="must be at least 1, not 0"):
        asyncio.run(run_arithmetic("http://127.0.0.1:9", **options))  # type: ignore[arg-type]


def test_the_reference_has_unequal_lengths_and_a_value_for_each_token() -> None:
    tokens = PromptTokens()
    lengths = sorted(len(tokens.of(item)[0]) for item in REFERENCE.items)
    assert len(REFERENCE.items) == 320
    assert lengths[0] < 16
    assert lengths[-1] > 500
    assert len(set(lengths)) > 100
    for item in REFERENCE.items:
        assert len(tokens.of(item)[1]) == len(item.log_probabilities)
