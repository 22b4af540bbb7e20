"""What the probe says on the machine with the GPU."""

from __future__ import annotations

import sys
import time

import pytest
import torch

from minserve.kernels import stacks


def test_probe_and_auto(capsys: pytest.CaptureFixture[str]) -> None:
    start = time.perf_counter()
    verdicts = stacks.probe()
    with capsys.disabled():
        for verdict in verdicts:
            sys.stdout.write(f"\n{verdict.library}: {verdict.version}: {verdict.detail}")
        sys.stdout.write(f"\nprobe took {time.perf_counter() - start:.1f} s\n")
    choice = stacks.choose("auto", torch.device("cuda"), verdicts)
    hopper = torch.cuda.get_device_capability() == (9, 0) and all(v.usable for v in verdicts if v.library != "deep_ep")
    assert choice.name == ("hopper" if hopper else "torch-gpu")
    assert choice.reason
