"""The lane law, driven through the production helper by a recording double."""

import contextlib

import pytest

from minserve.capture_flags import EAGER, CaptureFlags
from minserve.models.layers.streams import plan_streams, side_by_side

CAPTURE = CaptureFlags(capturing=True, allow_overlap=True, allow_inplace=False, disable_dispose_tensor=True)


class RecordingLanes:
    """Writes down (stream, what) in the order of recording."""

    def __init__(self):
        self.log = []
        self.stream = "main"
        self.open_side_work = False

    def launch(self, what):
        self.log.append((self.stream, what))
        if self.stream == "alt":
            self.open_side_work = True

    def fork(self):
        self.log.append(("main", "fork"))
        return "fork"

    @contextlib.contextmanager
    def alt(self, fork):
        assert fork == "fork"
        self.stream = "alt"
        try:
            yield
        finally:
            self.stream = "main"

    def join(self):
        self.log.append(("main", "join"))
        self.open_side_work = False


def layer(lanes, plan):
    def routed():
        lanes.launch("routed")
        return "r"

    def shared():
        lanes.launch("shared")
        return "s"

    return side_by_side(routed, shared, plan)


def test_every_layer_forks_records_main_then_side_and_joins_once():
    lanes = RecordingLanes()
    for _ in range(61):
        assert layer(lanes, lanes) == ("r", "s")
    one_layer = [("main", "fork"), ("main", "routed"), ("alt", "shared"), ("main", "join")]
    assert lanes.log == one_layer * 61


def test_serial_forks_nothing():
    lanes = RecordingLanes()
    assert layer(lanes, None) == ("r", "s")
    assert lanes.log == [("main", "routed"), ("main", "shared")]


def test_an_exception_in_the_side_block_is_joined_and_the_next_layer_is_whole():
    lanes = RecordingLanes()

    def broken():
        lanes.launch("shared")
        raise RuntimeError("side")

    with pytest.raises(RuntimeError, match="side"):
        side_by_side(lambda: lanes.launch("routed"), broken, lanes)
    assert lanes.stream == "main"
    assert not lanes.open_side_work
    lanes.log.clear()
    layer(lanes, lanes)
    assert [what for _, what in lanes.log] == ["fork", "routed", "shared", "join"]


def test_an_exception_in_the_main_block_leaves_nothing_unjoined():
    lanes = RecordingLanes()

    def broken():
        raise RuntimeError("main")

    with pytest.raises(RuntimeError, match="main"):
        side_by_side(broken, lambda: lanes.launch("shared"), lanes)
    assert not lanes.open_side_work
    assert ("alt", "shared") not in lanes.log


@pytest.mark.parametrize(
    ("policy", "flags", "num_tokens", "has_lanes", "overlapped"),
    [
        ("overlap", CAPTURE, 4, True, True),
        ("overlap", EAGER, 4, True, False),
        ("overlap", CAPTURE, 0, True, False),
        ("overlap", CAPTURE, 4, False, False),
        ("serial", CAPTURE, 4, True, False),
        ("fused", CAPTURE, 4, True, False),
    ],
)
def test_the_predicate(policy, flags, num_tokens, has_lanes, overlapped):
    lanes = RecordingLanes() if has_lanes else None
    assert (plan_streams(policy, lanes, flags, num_tokens) is not None) is overlapped


def test_overlap_refuses_inplace_experts():
    with pytest.raises(ValueError, match="in-place"):
        plan_streams("overlap", RecordingLanes(), CaptureFlags(allow_overlap=True, allow_inplace=True), 4)
