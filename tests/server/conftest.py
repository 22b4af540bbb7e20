"""A real edge on a loopback port, before a scripted engine, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from scripted_engine import Script, ScriptedEngine
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from waiting import PATIENCE

from minserve.config import Config
from minserve.errors import ExitCode
from minserve.messages import Ready
from minserve.request import Request
from minserve.server.app import serve
from minserve.server.token_pieces import byte_level_alphabet

MERGES = [("D", "E"), ("DE", "F"), ("H", "I"), ("t", "h"), ("th", "e")]
"""Few enough that tests can say how a text is cut: DEF, HI and the are one token, everything else is bytes."""
BOS, EOS = "<bos>", "<eos>"
TEMPLATE = (
    "{{ bos_token }}{% if tools %}[tools:{% for t in tools %}{{ t.function.name }};{% endfor %}]{% endif %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.content is not none %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}[call {{ call.function.name }} {{ call.function.arguments }}]{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% if shout %}!{% endif %}{% endif %}"
)
MAX_MODEL_LEN = 256


class Vocabulary:
    """Text to the ids that the test tokenizer gives it."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.size = self.tokenizer.get_vocab_size()
        self.bos = self.tokenizer.token_to_id(BOS)
        self.eos = self.tokenizer.token_to_id(EOS)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """The stream's events, the end mark as the string `[DONE]`."""
        lines = self.body.decode().split("\n\n")
        assert lines.pop() == ""
        assert all(line.startswith("data: ") and "\n" not in line for line in lines), lines
        return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


class Edge:
    """A server under test and its engine."""

    def __init__(self, config: Config, script: Script, ready: Ready, be_ready: bool) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen(1024)
        self.port: int = self.listener.getsockname()[1]
        self.config = config
        self.exit_code: ExitCode | None = None
        self.failure: BaseException | None = None
        self._socket = ours
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[ExitCode] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.engine = ScriptedEngine(theirs, script, ready=ready, be_ready=be_ready)
        if be_ready:
            self.wait_for(lambda: self.get("/ready").status == 200)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                self.exit_code = runner.run(self._serve())
            except asyncio.CancelledError:
                pass
            except BaseException as error:
                self.failure = error

    async def _serve(self) -> ExitCode:
        self._task = asyncio.current_task()
        return await serve(self.config, [self._socket], self.listener)

    def stop(self) -> None:
        if self._thread.is_alive() and self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)
        self.join()
        self.engine.join()

    def join(self) -> None:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout: float = PATIENCE
    ) -> Answer:
        """`body`: bytes as they are, anything else as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            sent = {"Content-Type": "application/json"} if data is not None else {}
            connection.request(method, path, data, {**sent, **(headers or {})})
            response = connection.getresponse()
            return Answer(response.status, dict(response.headers), response.read())
        finally:
            connection.close()

    def get(self, path: str, headers: dict[str, str] | None = None) -> Answer:
        return self.request("GET", path, headers=headers)

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None, timeout: float = PATIENCE) -> Answer:
        return self.request("POST", path, body, headers, timeout)

    def complete(self, prompt: Any = "hello", **fields: Any) -> Answer:
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    def chat(self, content: Any = "hello", **fields: Any) -> Answer:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})

    def metric(self, name: str, **labels: str) -> float:
        total = 0.0
        for line in self.get("/metrics").body.decode().splitlines():
            if line.startswith((f"minserve:{name}{{", f"minserve:{name} ")) and all(
                f'{k}="{v}"' in line for k, v in labels.items()
            ):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def wait_for(self, condition: Callable[[], bool], timeout: float = PATIENCE) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.failure is None, self.failure
            assert time.monotonic() < deadline, "the condition did not come true in time"
            time.sleep(0.005)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer and a chat template, and no weights."""
    directory = tmp_path_factory.mktemp("edge-model")
    tokens = [byte_level_alphabet()[byte] for byte in range(256)] + ["".join(pair) for pair in MERGES]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": BOS, "eos_token": EOS, "add_bos_token": True, "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture(scope="session")
def vocabulary(model_dir: Path) -> Vocabulary:
    return Vocabulary(model_dir)


def says(vocabulary: Vocabulary, text: str) -> Script:
    """A script that emits this text's tokens and then EOS."""
    tokens = [*vocabulary.ids(text), vocabulary.eos]
    return lambda _: tokens


@pytest.fixture(scope="session")
def start_edge(model_dir: Path, vocabulary: Vocabulary) -> Callable[..., AbstractContextManager[Edge]]:
    """`with start_edge(script, **config) as edge`: a server of its own. The script may be the text to say."""

    @contextlib.contextmanager
    def start(
        script: Script | str, *, be_ready: bool = True, max_model_len: int = MAX_MODEL_LEN, num_seqs: int = 64, **settings: Any
    ) -> Iterator[Edge]:
        config = Config(**{"model": str(model_dir), "served_model_name": ("tiny",), **settings})
        ready = Ready(
            model_type="scripted",
            vocab_size=vocabulary.size,
            max_model_len=max_model_len,
            max_num_seqs=num_seqs,
            eos_token_ids=(),
            num_pages=1 << 20,
            page_size=64,
            startup_seconds={"load": 0.5},
            info={"backend": "script"},
        )
        edge = Edge(config, says(vocabulary, script) if isinstance(script, str) else script, ready, be_ready)
        try:
            yield edge
        finally:
            edge.stop()

    return start


@pytest.fixture(scope="module")
def edge(start_edge: Callable[..., AbstractContextManager[Edge]]) -> Iterator[Edge]:
    """A server that a module's tests share; `say` tells it what to answer."""
    with start_edge("hello world") as shared:
        yield shared


class Say:
    """`say(text)`: what the shared engine answers from now on."""

    def __init__(self, edge: Edge, vocabulary: Vocabulary) -> None:
        self._edge = edge
        self._vocabulary = vocabulary

    def __call__(self, text: str) -> None:
        self._edge.engine.script = says(self._vocabulary, text)

    def tokens(self, tokens: list[int]) -> None:
        self._edge.engine.script = lambda _: tokens

    def by_request(self, script: Callable[[Request], list[int]]) -> None:
        self._edge.engine.script = script


@pytest.fixture
def say(edge: Edge, vocabulary: Vocabulary) -> Iterator[Say]:
    yield Say(edge, vocabulary)
    edge.engine.script = says(vocabulary, "hello world")
    edge.engine.step_seconds = 0.0
