"""What LangChain and lm-eval really sent to the embedded model, and what they were answered: sent again, answered the same.

The files of transcripts/ were recorded between those clients and a server; ids and times differ from run to run, the last digits
of log-probabilities from machine to machine.
"""

from __future__ import annotations

import http.client
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess, serving
from waiting import PATIENCE

FOLDER = Path(__file__).parent / "transcripts"
EXCHANGES = [
    pytest.param(exchange, id=f"{file.stem}-{number}")
    for file in sorted(FOLDER.glob("*.json"))
    for number, exchange in enumerate(json.loads(file.read_text()))
]
VOLATILE = ("id", "created")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving("--device", "cpu", log=tmp_path_factory.mktemp("transcripts") / "server.log") as server:
        yield server


def lasting(value: Any) -> Any:
    """Without what differs from run to run."""
    if isinstance(value, dict):
        return {key: lasting(part) for key, part in value.items() if key not in VOLATILE}
    return [lasting(part) for part in value] if isinstance(value, list) else value


def same(one: Any, other: Any) -> bool:
    """Equal, log-probabilities to a hundredth."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, abs_tol=0.01)
    return type(one) is type(other) and bool(one == other)


def events(text: str) -> list[Any]:
    """The data of a stream's events, or the one body of an answer that is none."""
    if not text.startswith("data: "):
        return [lasting(json.loads(text))]
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else lasting(json.loads(line)) for line in lines]


def test_there_are_transcripts_of_both_clients() -> None:
    assert {file.stem for file in FOLDER.glob("*.json")} == {"langchain", "lm_eval"}
    assert len(EXCHANGES) >= 8


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_an_exchange_goes_as_it_went(server: ServerProcess, exchange: dict[str, Any]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    try:
        body = None if exchange["body"] is None else json.dumps(exchange["body"])
        connection.request(exchange["method"], exchange["path"], body, exchange["headers"])
        answer = connection.getresponse()
        text = answer.read().decode()
    finally:
        connection.close()
    assert (answer.status, answer.headers["content-type"]) == (exchange["status"], exchange["type"])
    assert same(events(text), events(exchange["answer"])), text
