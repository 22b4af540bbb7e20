"""What is used once beside the imports works on its own, and leaves a CPU alone."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from minserve.runtime import first_uses


@pytest.mark.parametrize("vocab_size", [7, 320])
def test_every_use_works_and_draws_no_random_number(vocab_size):
    before = torch.random.get_rng_state()
    first_uses.use(torch.device("cpu"), torch.bfloat16, vocab_size)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_others_go_on_meanwhile_and_a_fault_is_left_to_whoever_meets_it_next(monkeypatch):
    begun, ended, usual = threading.Event(), threading.Event(), sys.getswitchinterval()
    unheeded = []
    monkeypatch.setattr(threading, "excepthook", unheeded.append)

    def use(*_):
        begun.wait()
        ended.set()
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(first_uses, "use", use)
    uses = first_uses.FirstUses()
    uses.start(torch.device("cuda", 0), torch.bfloat16, 320)
    assert not ended.is_set()
    begun.set()
    uses.wait()
    assert ended.is_set()
    assert not unheeded
    assert sys.getswitchinterval() == usual


def test_a_cpu_has_nothing_to_load(monkeypatch):
    used = []
    monkeypatch.setattr(first_uses, "use", lambda *what: used.append(what))
    uses = first_uses.FirstUses()
    uses.start(torch.device("cpu"), torch.float32, 320)
    uses.wait()
    assert not used
