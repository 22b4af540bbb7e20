"""A small aiohttp client of an OpenAI-style server: JSON in, JSON out, faults as sentences. Knows no endpoint's meaning."""

from __future__ import annotations

import json
from types import TracebackType
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
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS),
            connector=aiohttp.TCPConnector(limit=0),
        )
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._session is not None:
            await self._session.close()

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return await self._json("POST", path, body)

    async def first_model(self) -> str:
        """The first name of /v1/models."""
        listed = (await self._json("GET", "/models", None))["data"]
        if not listed:
            raise EnvironmentFault(f"{self._root}/models lists no model; name one with --model")
        return str(listed[0]["id"])

    async def _json(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """The decoded object. Raises RequestRefused on an error status, EnvironmentFault when there is no such server."""
        if self._session is None:
            raise RuntimeError("the client is used outside its context")
        url = self._root + path
        try:
            async with self._session.request(method, url, json=body) as response:
                text = await response.text()
                if response.status >= 400:
                    raise RequestRefused(f"{url} answered {response.status}: {_message(text)}")
                decoded = json.loads(text)
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError):
            raise EnvironmentFault(f"{url} is no http address") from None
        except TimeoutError:
            raise EnvironmentFault(f"{url} gave no answer within {TIMEOUT_SECONDS:.0f} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EnvironmentFault(f"cannot reach {url}: {error}; is the server up?") from None
        except ValueError:
            raise EnvironmentFault(f"{url} answered with something that is not JSON; is this an OpenAI-style server?") from None
        if not isinstance(decoded, dict):
            raise EnvironmentFault(f"{url} answered with something that is no JSON object; is this an OpenAI-style server?")
        return decoded


def _message(text: str) -> str:
    """The error's message out of an OpenAI-style body, else the beginning of the body."""
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = text
    return str(message)[:300]
