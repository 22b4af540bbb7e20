"""A small aiohttp client of an OpenAI-style server: JSON in, JSON out, faults as sentences. Knows no endpoint's meaning."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, Self

import aiohttp

from minserve.errors import EnvironmentFault

TIMEOUT_SECONDS = 600.0


class RequestRefused(EnvironmentFault):
    """The server answered with an error status."""


class OpenAIClient:
    """Use as an async context manager. `base_url` may end with /v1 or not."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        self._root = base_url.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def __aenter__(self) -> Self:
        timeout, connector = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS), aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout, connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return await self._json("POST", self._root + path, body)

    async def server_info(self) -> dict[str, Any]:
        """minserve's /server_info; other servers have none."""
        return await self._json("GET", f"{self._root.removesuffix('/v1')}/server_info", None)

    async def open_connections(self, count: int) -> None:
        """Have so many connections open, which later calls use, and which will tell what is wrong with them."""
        calls = (self._json("GET", f"{self._root}/models", None) for _ in range(count))
        await asyncio.gather(*calls, return_exceptions=True)

    async def events(self, path: str, body: dict[str, Any] | bytes) -> AsyncIterator[bytes]:
        """The data of each server-sent event, the end mark left out. `body` may be JSON already.

        Raises RequestRefused and EnvironmentFault.
        """
        url = self._root + path
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        with _faults(url):
            async with self._session.post(url, data=data, headers={"Content-Type": "application/json"}) as response:
                if response.status >= 400:
                    raise RequestRefused(f"{url} answered {response.status}: {_message(await response.text())}")
                waiting = b""
                async for part in response.content.iter_any():
                    *complete, waiting = (waiting + part).replace(b"\r\n", b"\n").split(b"\n\n")
                    for event in complete:
                        if event.startswith(b"data:") and (data := event[5:].strip()) != b"[DONE]":
                            yield data

    async def first_model(self) -> str:
        """The first name of /v1/models."""
        listed = (await self._json("GET", f"{self._root}/models", None))["data"]
        if not listed:
            raise EnvironmentFault(f"{self._root}/models lists no model; name one with --model")
        return str(listed[0]["id"])

    async def _json(self, method: str, url: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """The decoded object. Raises RequestRefused on an error status, EnvironmentFault when there is no such server."""
        with _faults(url):
            async with self._session.request(method, url, json=body) as response:
                text = await response.text()
                if response.status >= 400:
                    raise RequestRefused(f"{url} answered {response.status}: {_message(text)}")
        try:
            decoded = json.loads(text)
        except ValueError:
            decoded = None
        if not isinstance(decoded, dict):
            raise EnvironmentFault(f"{url} answered with something that is no JSON object; is this an OpenAI-style server?")
        return decoded


@contextlib.contextmanager
def _faults(url: str) -> Iterator[None]:
    """Makes sentences of what can go wrong on the way to a server."""
    try:
        yield
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError):
        raise EnvironmentFault(f"{url} is no http address") from None
    except TimeoutError:
        raise EnvironmentFault(f"{url} gave no answer within {TIMEOUT_SECONDS:.0f} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise EnvironmentFault(f"cannot reach {url}: {error}; is the server up?") from None


def _message(text: str) -> str:
    """The error's message out of an OpenAI-style body, else the beginning of the body."""
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = text
    return str(message)[:300]
