"""The engine's order of events with constrained requests, without sockets: for any runner, on any device."""

from __future__ import annotations

import time
from collections.abc import Sequence

from minserve.request import Request
from minserve.runtime.grammar import Grammars
from minserve.runtime.model_runner import ModelRunner
from minserve.runtime.scheduler import Scheduler


def run(runner: ModelRunner, requests: Sequence[Request], pieces: Sequence[bytes]) -> dict[int, list[int]]:
    """Each request's output tokens. None of them may fail."""
    scheduler, grammars = Scheduler(runner.limits), Grammars(runner.limits.vocab_size)
    grammars.set_vocabulary(pieces, [])
    for request in requests:
        if request.sampling.grammar is None:
            assert scheduler.add(request) is None
        else:
            grammars.compile(request)
    while grammars.compiling:
        ready, failed = grammars.settled()
        assert not failed, failed
        for request in ready:
            assert scheduler.add(request) is None
        time.sleep(0.001)
    tokens: dict[int, list[int]] = {request.id: [] for request in requests}
    in_flight = None
    while in_flight is not None or scheduler.has_work:
        step = scheduler.schedule(0.0)
        awaits_masks = step is not None and grammars.concern(step)
        launched = runner.launch(step, awaits_masks=awaits_masks) if step is not None else None
        if in_flight is not None:
            for output in grammars.advance(scheduler.retire(in_flight.step, in_flight.result())):
                assert output.error is None, output.error
                tokens[output.request_id] += output.token_ids
                if output.finish_reason is not None:
                    scheduler.drop([output.request_id])
        if launched is not None and awaits_masks:
            launched.constrain(grammars.masks(launched.step))
            assert not grammars.failures()
        in_flight = launched
    return tokens
