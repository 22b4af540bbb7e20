"""The front's life: listen, load, serve, drain, leave with an exit code; and which path is answered by what."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

from aiohttp import web

from minserve.config import Config
from minserve.errors import ExitCode
from minserve.server.admin import AdminEndpoints, Page
from minserve.server.api_errors import unavailable
from minserve.server.engine_client import Death
from minserve.server.engine_pool import EnginePool
from minserve.server.front import Front, Siblings
from minserve.server.generate import ANSWERS, GenerateEndpoints, SlowReaders
from minserve.server.http import MODELS, BodyReader, HttpServer, Routes

log = logging.getLogger("minserve.server")

LISTEN_BACKLOG = 4096
"""Connections of a burst that may wait to be accepted; the kernel caps it at net.core.somaxconn."""
UNSENT_BYTES = 1 << 17
"""What the kernel holds of an answer that its client does not read; without this bound, megabytes."""
_OPEN_PATHS = frozenset({"/health", "/ready", "/version"})
"""Asked without a key, by probes and balancers."""
_SWEEP_SECONDS = 1.0
_ENGINES_LEAVE_WITHIN = 5.0
_CONNECTIONS_CLOSE_WITHIN = 1.0

_Signal = asyncio.Future[signal.Signals]


async def serve(
    config: Config,
    engine_sockets: list[socket.socket],
    listen_socket: socket.socket,
    worker: int = 0,
    siblings: Siblings | None = None,
) -> ExitCode:
    """Serve until a signal or a death; the code that the process is to leave with. Both kinds of socket are closed after.

    From the first moment on HTTP is answered, with 503 while engines and tokenizer load. SIGTERM and SIGINT drain: new requests
    get 503, those under way have `drain_timeout` seconds, then the engines are told to leave; a second signal leaves at once.
    `worker` is this process's number among `config.front_workers` on one port, `siblings` the others. Raises CheckpointError or
    UsageError when the tokenizer cannot be loaded.
    """
    engines = EnginePool(config.local_ranks, config.max_queued_requests, worker, config.front_workers)
    front = Front(config, engines, siblings)
    slow_readers = SlowReaders()
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    url = f"http://{f'[{host}]' if ':' in host else host}:{listen_socket.getsockname()[1]}"
    try:
        async with (
            front.siblings.answering(front.answers_for_siblings()),
            _listening(_http(front, slow_readers), listen_socket),
        ):
            with _signals() as signals:
                return await _live(front, engine_sockets, slow_readers, signals, url)
    finally:
        front.close()


@contextlib.contextmanager
def _signals() -> Iterator[tuple[_Signal, _Signal]]:
    """Takes SIGTERM and SIGINT for as long as it is open: the first and the second that comes.

    Only a process's main thread can; elsewhere none come.
    """
    loop = asyncio.get_running_loop()
    signals: tuple[_Signal, _Signal] = loop.create_future(), loop.create_future()

    def came(number: signal.Signals) -> None:
        for one in signals:
            if not one.done():
                one.set_result(number)
                return

    numbers = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
    for number in numbers:
        loop.add_signal_handler(number, came, number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)  # whoever made the loop has kept them waiting
    try:
        yield signals
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _live(
    front: Front, sockets: list[socket.socket], slow_readers: SlowReaders, signals: tuple[_Signal, _Signal], url: str
) -> ExitCode:
    """From loading to the exit code. The engines' sockets are closed on every way out."""
    loading = asyncio.create_task(_load(front, sockets, url))
    sweeping = asyncio.create_task(_sweep(front, slow_readers))
    leaving, leaving_at_once = signals
    waiting: set[asyncio.Future[Any]] = {loading, sweeping, leaving, front.engines.death}
    try:
        while True:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()  # raises what made the load fail; that also closes the engines' sockets, a death of no news
                waiting.discard(loading)
            if sweeping.done():
                front.engines.lose(sweeping.result())
            if front.engines.death.done():
                return _mourn(front.engines.death.result())
            if leaving.done():
                return await _leave(front, leaving.result(), leaving_at_once)
    finally:
        for task in (loading, sweeping):
            task.cancel()
        await asyncio.gather(loading, sweeping, return_exceptions=True)
        front.engines.close()


async def _load(front: Front, sockets: list[socket.socket], url: str) -> None:
    """The engines start in their own processes while the tokenizer is read here."""
    await front.engines.connect(sockets)
    starting = asyncio.create_task(front.engines.ready())
    try:
        tokenizer = await front.load_tokenizer()
        if front.engines.worker == 0:  # the other workers' sockets are heard only once an engine is ready
            front.engines.tell(tokenizer.vocabulary())
        model = front.become_ready(tokenizer, await starting)
        if front.engines.worker > 0:
            front.engines.tell(tokenizer.vocabulary())
    finally:
        starting.cancel()
    gc.collect()
    gc.freeze()  # what is loaded stays: the collector need not walk over it again and again while tokens come
    log.info("ready: %s, context of %d tokens, at %s", model.facts.name, model.facts.context_length, url)
    example = '{"messages": [{"role": "user", "content": "What is 23 + 58?"}], "temperature": 0}'
    key = " -H 'Authorization: Bearer YOUR_KEY'" if front.config.api_key else ""
    log.info("try: curl %s/v1/chat/completions%s -H 'Content-Type: application/json' -d '%s'", url, key, example)


async def _sweep(front: Front, slow_readers: SlowReaders) -> Death:
    """Every second: cut off clients that do not read. Returns when an engine has been silent for the watchdog's time."""
    while True:
        began = time.monotonic()
        await asyncio.sleep(_SWEEP_SECONDS)
        slow_readers.sweep()
        if time.monotonic() - began > 2 * _SWEEP_SECONDS:
            front.engines.forgive()  # this process stood still itself, as a paused machine does: nobody was silent
        rank, silence = front.engines.silence()
        if silence > front.config.watchdog_timeout:
            return Death(rank, ExitCode.RANK_DIED, f"the watchdog fired: engine {rank} has said nothing for {silence:.0f} s")


def _mourn(death: Death) -> ExitCode:
    log.error("%s", death.message or f"engine {death.rank} ended without a word")
    return death.exit_code


async def _leave(front: Front, first: signal.Signals, at_once: _Signal) -> ExitCode:
    """Drain, then tell the engines to leave. A second signal cuts either short."""
    was_ready, front.phase = front.phase == "ready", "draining"
    if was_ready:
        timeout, others = front.config.drain_timeout, (at_once, front.engines.death)
        log.info("%s: draining for at most %g s; a second signal leaves at once", first.name, timeout)
        if not await _finished(front.quiet(), others, timeout):
            log.warning("%d answers are cut off", len(front.generations))
            for generation in list(front.generations.values()):
                generation.abort("drain", unavailable("The server is shutting down", "draining"))
        if not at_once.done():
            await _finished(front.engines.shut_down(_ENGINES_LEAVE_WITHIN), others, 2 * _ENGINES_LEAVE_WITHIN)
    if front.engines.death.done():
        return _mourn(front.engines.death.result())
    return ExitCode.INTERRUPTED if first is signal.SIGINT else ExitCode.OK


async def _finished(work: Coroutine[Any, Any, None], others: tuple[asyncio.Future[Any], ...], timeout: float) -> bool:
    """Whether `work` came to its end before any of `others` and within `timeout` seconds; else it is cancelled."""
    task = asyncio.ensure_future(work)
    await asyncio.wait({task, *others}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finished = task.done()
    task.cancel()
    return finished


def _http(front: Front, slow_readers: SlowReaders) -> HttpServer:
    """Every path and what answers it."""
    bodies, page = BodyReader(front.config.max_body_bytes), Page()
    admin, generate = AdminEndpoints(front, bodies), GenerateEndpoints(front, bodies, slow_readers)
    routes: Routes = {
        **dict.fromkeys(page.files, ("GET", page.file)),
        "/health": ("GET", admin.health),
        "/ready": ("GET", admin.ready),
        "/version": ("GET", admin.version),
        "/metrics": ("GET", admin.metrics),
        "/server_info": ("GET", admin.server_info),
        "/v1/models": ("GET", admin.models),
        MODELS: ("GET", admin.model),
        **{path: ("POST", generate.answering(prepare)) for path, prepare in ANSWERS.items()},
        "/v1/messages/count_tokens": ("POST", generate.count_tokens),
        "/tokenize": ("POST", admin.tokenize),
        "/detokenize": ("POST", admin.detokenize),
        "/abort_request": ("POST", admin.abort_request),
        **{f"/{name}": ("POST", admin.control(name)) for name in ("flush_cache", "start_profile", "stop_profile")},
    }
    return HttpServer(front.config, routes, _OPEN_PATHS | page.files.keys())


@contextlib.asynccontextmanager
async def _listening(server: HttpServer, listen_socket: socket.socket) -> AsyncIterator[None]:
    runner = web.ServerRunner(server, handle_signals=False, shutdown_timeout=_CONNECTIONS_CLOSE_WITHIN)
    await runner.setup()
    if sys.platform == "linux":  # accepted sockets inherit it
        listen_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    try:
        await web.SockSite(runner, listen_socket, backlog=LISTEN_BACKLOG).start()
        yield
    finally:
        await runner.cleanup()
        listen_socket.close()
