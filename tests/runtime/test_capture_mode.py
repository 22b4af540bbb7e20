"""One owner of the capture flags: nesting, exceptions, threads; and buffers that a capture must not free."""

import dataclasses
import threading

import pytest
import torch

from minserve.capture_flags import EAGER
from minserve.kernels.owned_buffer import OwnedBuffer, dispose_tensor
from minserve.runtime.capture_mode import capture_mode, current_flags


def test_eager_outside():
    assert current_flags() == EAGER
    assert not EAGER.disable_dispose_tensor
    assert not EAGER.allow_overlap


def test_enter_sets_and_exit_restores():
    with capture_mode("record", padded_batch_size=8) as flags:
        assert current_flags() is flags
        assert flags.capturing
        assert flags.disable_dispose_tensor
        assert flags.padded_batch_size == 8
        assert not (flags.allow_inplace or flags.allow_host_sync or flags.allow_jit)
    assert current_flags() == EAGER


def test_nesting_restores_the_outer_value():
    with capture_mode("record", padded_batch_size=8) as outer:
        with capture_mode("record", padded_batch_size=2, kind="mixed") as inner:
            assert current_flags() is inner
        assert current_flags() is outer
    assert current_flags() == EAGER


def test_an_exception_restores_the_earlier_flags():
    with capture_mode("warm-up", padded_batch_size=4) as outer:
        with pytest.raises(RuntimeError, match="middle"), capture_mode("record", padded_batch_size=4):
            raise RuntimeError("middle of a capture")
        assert current_flags() is outer
    assert current_flags() == EAGER


def test_other_threads_never_see_it():
    seen = []
    with capture_mode("record", padded_batch_size=4):
        thread = threading.Thread(target=lambda: seen.append(current_flags()))
        thread.start()
        thread.join()
    assert seen == [EAGER]


def test_warm_up_and_record_differ_in_phase_and_jit_alone():
    with capture_mode("warm-up", padded_batch_size=4) as warm_up:
        pass
    with capture_mode("record", padded_batch_size=4) as record:
        pass
    assert dataclasses.replace(warm_up, phase="record", allow_jit=False) == record
    assert warm_up.allow_jit


def test_flags_cannot_be_changed_by_their_readers():
    with capture_mode("record", padded_batch_size=4) as flags, pytest.raises(dataclasses.FrozenInstanceError):
        flags.allow_inplace = True


def test_dispose_frees_owned_memory_but_not_in_a_capture():
    buffer = OwnedBuffer((4, 4), torch.float32, torch.device("cpu"))
    view = buffer.tensor[1:]
    with capture_mode("record", padded_batch_size=1) as flags:
        dispose_tensor(buffer, flags)
    assert view.untyped_storage().nbytes() == 64
    dispose_tensor(buffer, current_flags())
    assert view.untyped_storage().nbytes() == 0


def test_dispose_refuses_what_it_does_not_own():
    tensor = torch.ones(3)
    with pytest.raises(TypeError, match="OwnedBuffer"):
        dispose_tensor(tensor, EAGER)
    assert tensor.sum() == 3
