"""The engine process: one model, one loop. Admit what the front sent, schedule, run, publish what came out.

Knows messages and the order of things; nothing of text, HTTP, pages or tensors.
"""

from __future__ import annotations

import logging
import signal
import sys
import time

from minserve.errors import ExitCode, ServerError, UsageError
from minserve.messages import (
    AbortRequests,
    AddRequests,
    Call,
    Fatal,
    FinishRequest,
    Ready,
    Shutdown,
    StepOutputs,
    ToEngine,
)
from minserve.request import TokenOutput
from minserve.runtime.assembly import assemble
from minserve.runtime.connection import DESCRIPTOR_VARIABLE, FrontConnection, FrontGone
from minserve.runtime.controls import Controls
from minserve.runtime.model_runner import InFlight, ModelRunner
from minserve.runtime.scheduler import Scheduler
from minserve.runtime.startup import Timeline

HEARTBEAT_SECONDS = 0.5
"""An idle engine speaks this often; the front takes long silence for a stuck loop."""

log = logging.getLogger("minserve.runtime")


class Engine:
    """The loop. Heartbeats come from the loop itself, so that a stuck one is silent."""

    def __init__(self, connection: FrontConnection, scheduler: Scheduler, runner: ModelRunner, controls: Controls) -> None:
        self._connection = connection
        self._scheduler = scheduler
        self._runner = runner
        self._controls = controls
        self._refusals: list[TokenOutput] = []
        self._published_at = 0.0
        self._leaving = False

    def run(self) -> None:
        """Until the front says Shutdown. Raises FrontGone, and whatever a step raises: that is this engine's end."""
        in_flight: InFlight | None = None
        while True:
            heard = self._receive(wait=in_flight is None and not self._scheduler.has_work)
            if self._leaving:
                return
            # The next step is made and launched before the tokens of the one in flight are known: the device never waits.
            step = self._scheduler.schedule(time.monotonic())
            launched = self._runner.launch(step) if step is not None else None
            outputs, self._refusals = self._refusals, []
            if in_flight is not None:
                outputs += self._scheduler.retire(in_flight.step, in_flight.result())
            elif launched is None and self._scheduler.has_work:
                raise RuntimeError("requests are left, no step is in flight, and none can be made")
            self._publish(outputs, news=heard or in_flight is not None)
            in_flight = launched

    def _receive(self, *, wait: bool) -> bool:
        """Take in what the front sent, waiting for it at most until the next heartbeat; whether there was anything."""
        messages = self._connection.receive(HEARTBEAT_SECONDS if wait else 0.0)
        for message in messages:
            self._take(message)
        return bool(messages)

    def _take(self, message: ToEngine) -> None:
        match message:
            case AddRequests():
                for request in message.requests:
                    refusal = self._scheduler.add(request)
                    if refusal is not None:
                        self._refusals.append(refusal)
            case AbortRequests():
                self._scheduler.drop(message.request_ids)
            case FinishRequest():
                self._scheduler.drop([message.request_id])
            case Call():
                self._connection.send(self._controls.answer(message))
            case Shutdown():
                self._leaving = True

    def _publish(self, outputs: list[TokenOutput], *, news: bool) -> None:
        now = time.monotonic()
        if outputs or news or now - self._published_at >= HEARTBEAT_SECONDS:
            self._connection.send(StepOutputs(outputs, self._scheduler.stats()))
            self._published_at = now


def start(connection: FrontConnection) -> Engine:
    """Everything from the config to Ready. Raises ServerError."""
    config = connection.receive_config()
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"
    )
    logging.raiseExceptions = False  # a reader of our stderr that went away must not end the engine
    timeline = Timeline(connection.send, "import")
    try:
        parts = assemble(config, timeline)
        startup_seconds = timeline.finish()
    finally:
        timeline.stop()
    info = parts.info | {"startup_seconds": startup_seconds}
    log.info("ready after %.2f s", sum(startup_seconds.values()))
    connection.send(
        Ready(
            model_type=parts.model_config.model_type,
            vocab_size=parts.model_config.vocab_size,
            max_model_len=parts.limits.max_model_len,
            max_num_seqs=parts.limits.max_num_seqs,
            eos_token_ids=parts.model_config.eos_token_ids,
            num_pages=parts.limits.num_pages,
            page_size=parts.limits.page_size,
            startup_seconds=startup_seconds,
            info=info,
        )
    )
    return Engine(connection, parts.scheduler, parts.runner, Controls(parts.scheduler, info, parts.runner.device))


def serve(connection: FrontConnection) -> ExitCode:
    """Start and run; every end has its exit code, and a last word to the front where it needs one."""
    try:
        start(connection).run()
    except FrontGone:
        return ExitCode.RANK_DIED
    except ServerError as error:
        return _last_word(connection, error.exit_code, str(error))
    except Exception as error:
        log.exception("the engine ends")
        return _last_word(connection, ExitCode.INTERNAL, f"the engine failed: {type(error).__name__}: {error}")
    return ExitCode.OK


def _last_word(connection: FrontConnection, code: ExitCode, message: str) -> ExitCode:
    connection.leave_alone()
    try:
        connection.send(Fatal(code, message))
    except FrontGone:
        log.error("%s", message)  # nobody else will say it
    return code


def main() -> int:
    """The process's exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the front, which drains and then ends this engine
        signal.signal(number, signal.SIG_IGN)
    try:
        connection = FrontConnection.inherited()
    except (KeyError, ValueError, OSError):
        sys.stderr.write(f"minserve: error: engines are started by `minserve launch` ({DESCRIPTOR_VARIABLE} names no socket)\n")
        return UsageError.exit_code
    connection.leave_with_front()
    code = serve(connection)
    connection.leave_alone()
    return code


if __name__ == "__main__":
    sys.exit(main())
