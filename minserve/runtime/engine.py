"""The engine process: one model, one loop. Admit what the front sent, schedule, run, publish what came out.

Knows messages and the order of things; nothing of text, HTTP, pages or tensors.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import gc
import logging
import os
import signal
import sys
import time
from typing import NoReturn

from minserve import messages
from minserve import seat as seats
from minserve.errors import ExitCode, RankLost, ServerError, UsageError
from minserve.models.layers.dispatcher import CollectiveFailed
from minserve.request import Request, TokenOutput
from minserve.runtime import parallel
from minserve.runtime.assembly import assemble
from minserve.runtime.connection import FrontConnection, FrontGone
from minserve.runtime.controls import Controls
from minserve.runtime.grammar import Grammars
from minserve.runtime.model_runner import InFlight, ModelRunner
from minserve.runtime.parallel import Group
from minserve.runtime.scheduler import Scheduler
from minserve.runtime.startup import Timeline
from minserve.runtime.step import ScheduledStep
from minserve.runtime.step_agreement import IDLE, Agreed, Kind, Proposal
from minserve.runtime.step_clock import StepClock
from minserve.seat import ALONE, Seat

HEARTBEAT_SECONDS = 0.5
"""An idle engine speaks this often; the front takes long silence for a stuck loop."""

GRAMMAR_SECONDS = 0.002
"""An engine that has nothing to do but to wait for a grammar looks this often whether it is compiled."""

SHUTDOWN_SECONDS = 2.0
"""A rank that leaves with the others waits so long for its own front to say so."""

log = logging.getLogger("minserve.runtime")


class Engine:
    """The loop. Heartbeats come from the loop itself, so that a stuck one is silent."""

    def __init__(
        self,
        connection: FrontConnection,
        scheduler: Scheduler,
        runner: ModelRunner,
        controls: Controls,
        grammars: Grammars,
        group: Group | None = None,
    ) -> None:
        """`group`: the ranks that step together; none for an engine that has all experts."""
        self._group = group or parallel.alone()
        self._agreement = self._group.agreement
        self._calls: collections.deque[messages.Call] = collections.deque()
        self._num_answered = 0
        self._connection = connection
        self._scheduler = scheduler
        self._runner = runner
        self._grammars = grammars
        self._controls = controls
        self._refusals: list[TokenOutput] = []
        self._most_tokens: int | None = None
        self._clock = StepClock(scheduler.limits.mixed_sizes)
        self._published_at = 0.0
        self._leaving = False

    def run(self) -> None:
        """Until a front says Shutdown. Raises FrontGone, RankLost, and whatever a step raises: that is this engine's end."""
        self._connection.wake_on(self._agreement.descriptors)
        try:
            self._step_together()
        except RankLost as lost:
            self._agreement.accuse(lost.rank)
            raise
        except FrontGone:
            raise
        except Exception as error:
            lost_rank = self._agreement.blame() if isinstance(error, CollectiveFailed) else None
            self._agreement.accuse(self._group.seat.rank if lost_rank is None else lost_rank.rank)
            if lost_rank is None:
                raise
            raise lost_rank from error
        self._wait_for_shutdown()
        self._agreement.close()

    def _step_together(self) -> None:
        """Until a rank leaves."""
        in_flight: InFlight | None = None
        while True:
            idle = in_flight is None and not self._scheduler.has_work
            heard = self._receive(self._patience if idle and not self._agreement.called else 0.0)
            if in_flight is not None and self._runner.runs_behind_host and self._group.seat.num_ranks == 1:
                heard |= self._gather()
            # The next step is made and launched before the tokens of the one in flight are known: the device never waits.
            began = time.monotonic()
            step = self._scheduler.schedule(began, self._most_tokens)
            awaits_masks = step is not None and self._grammars.concern(step)
            agreed = self._agree(step, idle=idle)
            if agreed.stop:
                return
            launched = self._launch(step, agreed, awaits_masks=awaits_masks)
            self._clock.made(time.monotonic() - began)
            outputs, self._refusals = self._refusals, []
            if in_flight is not None:
                outputs += self._retire(in_flight, launched)
            elif launched is not None:
                self._clock.begun(launched.step, time.monotonic())
            elif self._scheduler.has_work:
                raise RuntimeError("requests are left, no step is in flight, and none can be made")
            if launched is not None and awaits_masks:
                # Only now every earlier token is known; the forward has been running meanwhile.
                launched.constrain(self._grammars.masks(launched.step))
                self._refuse(self._grammars.failures())
            self._publish(outputs, news=heard or in_flight is not None)
            in_flight = launched

    def _gather(self) -> bool:
        """Take in what comes until the next step has to be made, if that has room for it; whether there was anything."""
        heard = False
        while (seconds := self._clock.seconds_left(time.monotonic())) > 0 and self._scheduler.has_room:
            heard |= self._receive(min(seconds, self._patience))
        return heard

    def _retire(self, in_flight: InFlight, launched: InFlight | None) -> list[TokenOutput]:
        """What the step in flight told once it has ended; the one launched after it runs from then on."""
        result = in_flight.result()
        if result.seconds is not None:
            self._clock.retired(in_flight.step, result.seconds)
        self._clock.begun(None if launched is None else launched.step, time.monotonic())
        return self._told(self._scheduler.retire(in_flight.step, result))

    def _agree(self, step: ScheduledStep | None, *, idle: bool) -> Agreed:
        """What all ranks do next. One that is idle and has nothing to say wakes nobody."""
        news = self._leaving or self._calls or step is not None
        if idle and not news and not self._agreement.called:
            return IDLE
        kind = Kind.IDLE
        if step is not None:
            kind = Kind.DECODE if step.decodes_only else Kind.MIXED if step.num_decode_rows else Kind.PREFILL
        calls = self._num_answered + len(self._calls)
        proposal = Proposal(kind, 0 if step is None else step.num_tokens, calls, self._leaving)
        agreed = self._agreement.agree(proposal, lambda: self._publish([], news=False))
        # A prompt must not stall a rank that only decodes: while there is one, steps stay small enough for its graphs.
        self._most_tokens = self._runner.low_latency_rows if agreed.someone_only_decodes else None
        while self._num_answered < agreed.num_calls:
            self._num_answered += 1
            self._connection.send(self._controls.answer(self._calls.popleft()))
        return agreed

    def _launch(self, step: ScheduledStep | None, agreed: Agreed, *, awaits_masks: bool) -> InFlight | None:
        """This rank's part of the agreed step; None when there is none for anybody."""
        together = self._group.seat.num_ranks > 1
        if step is not None:
            rows = agreed.rows_per_rank if together else None
            all_decode = agreed.kind is Kind.DECODE
            return self._runner.launch(step, awaits_masks=awaits_masks, rows_per_rank=rows, all_decode=all_decode)
        if agreed.kind is Kind.IDLE:
            return None
        return self._runner.launch_dummy(max(1, agreed.rows_per_rank), all_decode=agreed.kind is Kind.DECODE)

    def _wait_for_shutdown(self) -> None:
        """The ranks have agreed to leave: this host's front says so to all of its own, or the end came from another host."""
        deadline = time.monotonic() + SHUTDOWN_SECONDS
        while not self._leaving and time.monotonic() < deadline:
            self._receive(self._patience)
        if not self._leaving:
            raise RankLost("another host's ranks were told to stop, and this host's cannot go on without them", -1)

    @property
    def _patience(self) -> float:
        """Seconds for which an engine may wait for its front."""
        return GRAMMAR_SECONDS if self._grammars.compiling else HEARTBEAT_SECONDS

    def _receive(self, seconds: float) -> bool:
        """Take in what the front sent, waiting for it at most so long, and what waited for a grammar; whether it spoke."""
        heard = self._connection.receive(seconds)
        for message in heard:
            self.take(message)
        self._add_compiled()
        return bool(heard)

    def take(self, message: messages.ToEngine) -> None:
        """What the front says, as if it had just come."""
        match message:
            case messages.AddRequests():
                for request in message.requests:
                    if request.sampling.grammar is None:
                        self._add(request)
                    else:
                        self._grammars.compile(request)
            case messages.AbortRequests():
                self._drop(message.request_ids)
            case messages.FinishRequest():
                self._drop([message.request_id])
            case messages.Vocabulary():
                self._grammars.set_vocabulary(message.pieces, message.special_token_ids)
            case messages.Call():
                self._calls.append(message)
            case messages.Shutdown():
                self._leaving = True

    def _add(self, request: Request) -> None:
        refusal = self._scheduler.add(request)
        if refusal is not None:
            self._refusals.append(refusal)
            self._grammars.forget([request.id])

    def _add_compiled(self) -> None:
        """Requests wait for their grammars outside of the scheduler; the batch goes on."""
        if self._grammars.compiling:
            ready, failed = self._grammars.settled()
            self._refuse(failed)
            for request in ready:
                self._add(request)

    def _refuse(self, ends: list[TokenOutput]) -> None:
        """Requests that end for a reason of their own."""
        self._drop([end.request_id for end in ends])
        self._refusals += ends

    def _drop(self, request_ids: list[int]) -> None:
        self._scheduler.drop(request_ids)
        self._grammars.forget(request_ids)

    def _told(self, outputs: list[TokenOutput]) -> list[TokenOutput]:
        """A step's outputs with the ends that grammars put to them."""
        told = self._grammars.advance(outputs)
        if told is not outputs:
            self._scheduler.drop([output.request_id for output in told if output.finish_reason is not None])
        return told

    def _publish(self, outputs: list[TokenOutput], *, news: bool) -> None:
        now = time.monotonic()
        if outputs or news or now - self._published_at >= HEARTBEAT_SECONDS:
            self._connection.send(messages.StepOutputs(outputs, self._scheduler.stats()))
            self._published_at = now


def start(connection: FrontConnection, seat: Seat) -> Engine:
    """Everything from the config to Ready. Raises ServerError."""
    config = connection.receive_config()
    who = f"rank {seat.rank} " if seat.num_ranks > 1 else ""
    logging.basicConfig(
        level=config.log_level.upper(), format=f"%(asctime)s {who}%(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"
    )
    logging.raiseExceptions = False  # a reader of our stderr that went away must not end the engine
    timeline = Timeline(connection.send, "import")
    try:
        if seat.num_ranks > 1:
            timeline.begin("meet the other ranks")
        group = parallel.join(seat, config.watchdog_timeout, on_gpus=config.device != "cpu")
        early = _Early(connection)
        parts = assemble(config, timeline, group, early.listen)
        timeline.begin("vocabulary")
        grammars = early.listen(parts.model.config.vocab_size)
        if seat.num_ranks > 1:
            timeline.begin("wait for the other ranks")
        group.wait_for_all("ready")
        startup_seconds = timeline.finish()
    finally:
        timeline.stop()
    limits = parts.runner.limits
    gc.freeze()  # the model stays: the collector need not walk over it again and again while tokens come
    gc.enable()
    info = parts.info | {"startup_seconds": startup_seconds}
    log.info("ready after %.2f s", sum(startup_seconds.values()))
    connection.send(
        messages.Ready(
            model_type=parts.model.config.model_type,
            vocab_size=parts.model.config.vocab_size,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            eos_token_ids=parts.model.config.eos_token_ids,
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            startup_seconds=startup_seconds,
            info=info,
        )
    )
    controls = Controls(parts.scheduler, info, parts.runner.device, grammars, parts.model.expert_load)
    engine = Engine(connection, parts.scheduler, parts.runner, controls, grammars, group)
    for message in early.heard:
        engine.take(message)
    return engine


class _Early:
    """What the front says while the engine starts. Its vocabulary takes a while to take in, best while the device is busy."""

    def __init__(self, connection: FrontConnection) -> None:
        self.heard: list[messages.ToEngine] = []
        """All but the vocabulary."""
        self._connection = connection
        self._grammars: Grammars | None = None

    def listen(self, vocab_size: int) -> Grammars:
        """Takes in what the front has begun to say by now, to its end."""
        grammars = self._grammars = self._grammars or Grammars(vocab_size)
        while self._connection.readable or self._connection.midway:
            for message in self._connection.receive(HEARTBEAT_SECONDS):
                if isinstance(message, messages.Vocabulary):
                    grammars.set_vocabulary(message.pieces, message.special_token_ids)
                else:
                    self.heard.append(message)
        return grammars


def serve(connection: FrontConnection, seat: Seat = ALONE) -> ExitCode:
    """Start and run; every end has its exit code, and a last word to the front where it needs one."""
    try:
        start(connection, seat).run()
    except FrontGone:
        return ExitCode.RANK_DIED
    except ServerError as error:
        return _last_word(connection, error.exit_code, str(error))
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            what = error.filename or "a compiled kernel"
            message = f"{error.strerror} for {what}: make room, or name another folder with --kernel-cache"
            return _last_word(connection, ExitCode.ENVIRONMENT, message)
        log.exception("the engine ends")
        return _last_word(connection, ExitCode.INTERNAL, f"the engine failed: {type(error).__name__}: {error}")
    return ExitCode.OK


def _last_word(connection: FrontConnection, code: ExitCode, message: str) -> ExitCode:
    connection.leave_alone()
    try:
        connection.send(messages.Fatal(code, message))
    except FrontGone:
        log.error("%s", message)  # nobody else will say it
    return code


def main() -> int:
    """The process's exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the front, which drains and then ends this engine
        signal.signal(number, signal.SIG_IGN)
    try:
        connection = FrontConnection.inherited()
        seat = seats.own_seat()
    except (KeyError, ValueError, OSError):
        sys.stderr.write(
            f"minserve: error: engines are started by `minserve launch` ({seats.DESCRIPTOR_VARIABLE} names no socket)\n"
        )
        return UsageError.exit_code
    connection.leave_with_front()
    code = serve(connection, seat)
    connection.leave_alone()
    return code


def leave(code: int) -> NoReturn:
    """End at once: the interpreter's own way out takes seconds with torch loaded, longer than the front waits before it
    kills, and threads of collectives may wait for ranks that are gone."""
    logging.shutdown()
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(code)
