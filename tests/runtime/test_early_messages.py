"""What a front says while its engine still starts: nothing of it is lost, and no half of it is left for the first steps."""

from __future__ import annotations

import gc
import logging
import threading
import time

import pytest
from runtime.front_double import FrontDouble

from minserve import config as configuration
from minserve.config import Config
from minserve.messages import AbortRequests, AddRequests, Shutdown, Vocabulary, encode_frame, frame
from minserve.request import FinishReason, Request, SamplingParams
from minserve.runtime import engine as engine_module
from minserve.runtime.connection import FrontGone
from minserve.seat import ALONE

PIECES = [bytes([index]) for index in range(256)] + [b"", b""]
VOCABULARY = encode_frame(Vocabulary(PIECES, [256, 257]))


def test_a_vocabulary_that_has_begun_is_taken_in_to_its_end_and_the_rest_is_kept(ends):
    ours, connection = ends
    early = engine_module._Early(connection)
    grammars = early.listen(258)
    assert grammars._tokenizer is None
    half = len(VOCABULARY) // 2
    ours.sendall(encode_frame(AbortRequests([1])) + VOCABULARY[:half])

    def finish() -> None:
        time.sleep(0.2)
        ours.sendall(VOCABULARY[half:] + encode_frame(AbortRequests([2])))

    slow = threading.Thread(target=finish)
    slow.start()
    assert early.listen(258) is grammars
    slow.join()
    assert grammars._tokenizer is not None
    assert early.listen(258) is grammars
    assert early.heard == [AbortRequests([1]), AbortRequests([2])]


def test_a_front_that_dies_midway_is_gone(ends):
    ours, connection = ends
    ours.sendall(VOCABULARY[:100])
    ours.close()
    with pytest.raises(FrontGone):
        engine_module._Early(connection).listen(258)


def test_an_engine_takes_what_it_heard_early_and_collects_garbage_once_it_is_ready(ends, tiny_dir, monkeypatch):
    ours, connection = ends
    monkeypatch.setattr(logging, "raiseExceptions", logging.raiseExceptions)
    config = Config(model=str(tiny_dir("qwen3_moe")), num_pages=40, max_num_seqs=4, device="cpu")
    sampling = SamplingParams(max_tokens=3, temperature=0.0, seed=0)
    request = Request(id=1, prompt_token_ids=[5, 6, 7], sampling=sampling, arrival_time=time.monotonic())
    ours.sendall(frame(configuration.encode(config)) + encode_frame(AddRequests([request])))
    gc.disable()
    try:
        engine = engine_module.start(connection, ALONE)
        assert gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()
    running = threading.Thread(target=engine.run, daemon=True)
    running.start()
    front = FrontDouble(ours)
    front.finish(1)
    front.send(Shutdown())
    running.join()
    assert front.reason(1) is FinishReason.LENGTH
