"""The page at `/`: its files, held in memory, and the headers that keep a browser to them. Knows nothing of what they show."""

from __future__ import annotations

import hashlib
from pathlib import Path

from aiohttp import web

from minserve.server.http import Exchange

DIRECTORY = Path(__file__).parent / "web"

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class Page:
    """Answers without a key: the files say nothing of the server, and what they ask it needs the key."""

    def __init__(self) -> None:
        files = [file for file in DIRECTORY.iterdir() if file.suffix in _TYPES]
        self._files = {_path(file.name): (_TYPES[file.suffix], file.read_bytes()) for file in files}

    @property
    def paths(self) -> frozenset[str]:
        return frozenset(self._files)

    async def file(self, exchange: Exchange) -> web.StreamResponse:
        content_type, body = self._files[exchange.path]
        tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        headers = {**exchange.headers, **_HEADERS, "ETag": tag}
        if exchange.request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, headers=headers, content_type=content_type, charset="utf-8")


def _path(name: str) -> str:
    return "/" if name == "index.html" else f"/web/{name}"
