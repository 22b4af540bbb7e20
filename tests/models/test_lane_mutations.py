"""The law of the two lanes holds through whole layers, and each way of breaking it in the production file is seen."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import types

import pytest
import torch
from paged_steps import PagedSteps, load
from unsummed_experts import expert_rows

from minserve.kernels import reference
from minserve.kernels.interface import ExpertRows
from minserve.models.layers import moe, streams
from minserve.runtime import capture_mode as capture_module


class RecordingLanes:
    """Writes down (stream, what) in the order of recording, and which stream is the current one."""

    def __init__(self):
        self.log = []
        self.stream = "main"

    def launch(self, what):
        self.log.append((self.stream, what))

    def fork(self):
        self.log.append((self.stream, "fork"))
        return len(self.log)

    @contextlib.contextmanager
    def alt(self, fork):
        assert self.log[fork - 1] == ("main", "fork")
        outer, self.stream = self.stream, "alt"
        try:
            yield
        finally:
            self.stream = outer

    def join(self):
        self.log.append((self.stream, "join"))


def faults(log, sparse_layers):
    """What is wrong with a recording: the law in words."""
    found = []
    forks = [index for index, entry in enumerate(log) if entry == ("main", "fork")]
    if len(forks) != sparse_layers:
        return [f"{len(forks)} forks in {sparse_layers} layers"]
    for start, end in zip(forks, [*forks[1:], len(log)], strict=True):
        section = log[start:end]
        if section.count(("main", "join")) != 1:
            found.append(f"{section.count(('main', 'join'))} joins")
            continue
        inside, after = section[1 : section.index(("main", "join"))], section[section.index(("main", "join")) + 1 :]
        alt = [index for index, (stream, _) in enumerate(inside) if stream == "alt"]
        if not alt:
            found.append("a fork for nothing")
        elif alt != list(range(alt[0], len(inside))):
            found.append("the side block is not right before its join")
        if ("main", "routed") not in inside:
            found.append("the routed experts are not recorded between fork and join")
        if any(stream == "alt" for stream, _ in after):
            found.append("side work after the join")
    return found


def recording(directory, capture_mode=capture_module.capture_mode, *, left=False):
    """A captured decode step of a real model, as its recording double saw it. `left`: norms sum what experts made."""
    lanes = RecordingLanes()

    def noted(name, function):
        def call(*arguments):
            lanes.launch(name)
            return function(*arguments)

        return call

    def norm(x, *arguments):
        if isinstance(x, ExpertRows):
            lanes.launch("sum" if x.added is None else "sum of both")
        return reference.add_rms_norm(x, *arguments)

    plain = reference.cpu()
    kernels = dataclasses.replace(
        plain,
        add_rms_norm=norm,
        experts_flat=noted("routed", plain.experts_flat),
        expert_rows=noted("routed", expert_rows) if left else None,
        linear=noted("linear", plain.linear),
        silu_and_mul=noted("silu", plain.silu_and_mul),
    )
    model = load(directory, kernels, shared_expert="overlap", lanes=lanes)
    steps = PagedSteps(model, kernels)
    steps.step([("a", [5, 6, 7])])
    eager, lanes.log = lanes.log, []
    assert {stream for stream, _ in eager} == {"main"}  # an eager step forks nothing
    with capture_mode("record", padded_batch_size=2) as flags:
        steps.step([("a", [8])], padding=1, flags=flags)
    sparse = sum(isinstance(module, moe.MixtureOfExperts) for module in model.modules())
    return lanes.log, sparse


@pytest.mark.parametrize("variant", ["deepseek_v3_small", "moonlight", "qwen2_moe"])
def test_every_layer_keeps_the_law(tiny_dir, variant):
    log, sparse = recording(tiny_dir(variant))
    assert sparse >= 2
    assert faults(log, sparse) == []
    # The gate of a gated shared expert belongs to the side block.
    side = [what for stream, what in log if stream == "alt"]
    assert side.count("silu") == sparse
    assert side.count("linear") == sparse * (3 if variant == "qwen2_moe" else 2)


@pytest.mark.parametrize("variant", ["deepseek_v3_small", "moonlight", "qwen2_moe"])
def test_a_norm_sums_both_after_the_join_and_before_the_next_fork(tiny_dir, variant):
    """Before: the alt stream has not written its half. After: the half's memory may be another's by then."""
    log, sparse = recording(tiny_dir(variant), left=True)
    assert faults(log, sparse) == []
    order = [entry for entry in log if entry[1] in ("fork", "routed", "join", "sum", "sum of both")]
    assert order == [("main", "fork"), ("main", "routed"), ("main", "join"), ("main", "sum of both")] * sparse


def mutated(module: types.ModuleType, old: str, new: str) -> types.ModuleType:
    """The module's source with one thing changed."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{old!r} is there {source.count(old)} times"
    copy = types.ModuleType(module.__name__)
    copy.__dict__["__file__"] = module.__file__
    exec(compile(source.replace(old, new), f"mutated {module.__name__}", "exec"), copy.__dict__)
    return copy


ALT_FIRST = (
    """    fork = lanes.fork()
    first = main()
    try:
        with lanes.alt(fork):
            second = side()
    finally:
        lanes.join()
    return first, second
""",
    """    with lanes.alt(lanes.fork()):
        second = side()
    first = main()
    lanes.join()
    return first, second
""",
)
UNGUARDED_JOIN = (
    """    try:
        with lanes.alt(fork):
            second = side()
    finally:
        lanes.join()
""",
    """    with lanes.alt(fork):
        second = side()
    lanes.join()
""",
)
STREAM_MUTATIONS: dict[str, tuple[str, str]] = {
    "alt first": ALT_FIRST,
    "late fork": ("    fork = lanes.fork()\n    first = main()\n", "    first = main()\n    fork = lanes.fork()\n"),
    "no join": ("    finally:\n        lanes.join()\n", "    finally:\n        pass\n"),
    "joined twice": ("        lanes.join()\n", "        lanes.join()\n        lanes.join()\n"),
    "side on main": ("        with lanes.alt(fork):\n            second = side()\n", "        second = side()\n"),
    "serial although asked": ("    return lanes\n", "    return None\n"),
}


@pytest.mark.parametrize("name", STREAM_MUTATIONS)
def test_a_broken_law_is_seen(tiny_dir, monkeypatch, name):
    broken = mutated(streams, *STREAM_MUTATIONS[name])
    monkeypatch.setattr(moe, "side_by_side", broken.side_by_side)
    monkeypatch.setattr("minserve.models.decoder.plan_streams", broken.plan_streams)
    log, sparse = recording(tiny_dir("deepseek_v3_small"))
    assert faults(log, sparse)


def test_an_unjoined_exception_is_seen():
    """Without `finally` a failing side block leaves the alt stream open, and no capture can end."""
    broken = mutated(streams, *UNGUARDED_JOIN)

    def fails():
        raise RuntimeError("side")

    logs = []
    for module in (streams, broken):
        lanes = RecordingLanes()
        with pytest.raises(RuntimeError, match="side"):
            module.side_by_side(lambda: None, fails, lanes)
        logs.append(lanes.log)
    assert ("main", "join") in logs[0]
    assert ("main", "join") not in logs[1]


FLAG_MUTATIONS: dict[str, tuple[str, str]] = {
    "in-place allowed": ("        allow_inplace=False,\n", "        allow_inplace=True,\n"),
    "dispose allowed": ("        disable_dispose_tensor=True,\n", "        disable_dispose_tensor=False,\n"),
    "not restored": ("    finally:\n        _current.reset(token)\n", "    finally:\n        pass\n"),
    "restored on success only": (
        "    try:\n        yield flags\n    finally:\n        _current.reset(token)\n",
        "    yield flags\n    _current.reset(token)\n",
    ),
    "other branches in warm-up": ("        capturing=True,\n", '        capturing=phase == "record",\n'),
    "eager inside": ("    token = _current.set(flags)\n", "    token = _current.set(EAGER)\n"),
}


def keeps_the_rules(module: types.ModuleType) -> bool:
    """What capture_mode promises, as one yes or no."""
    seen = []
    with contextlib.suppress(RuntimeError), module.capture_mode("warm-up", padded_batch_size=2) as warm_up:
        seen.append(module.current_flags() is warm_up)
        with contextlib.suppress(RuntimeError), module.capture_mode("record", padded_batch_size=2) as record:
            same = dataclasses.replace(warm_up, phase="record", allow_jit=False)
            seen.append(module.current_flags() is record and record == same)
            seen.append(record.disable_dispose_tensor and not record.allow_inplace and not record.allow_host_sync)
            raise RuntimeError("in the middle")
        seen.append(module.current_flags() is warm_up)
    seen.append(module.current_flags() == module.EAGER)
    return all(seen)


def test_the_flags_keep_their_rules():
    assert keeps_the_rules(capture_module)


@pytest.mark.parametrize("name", FLAG_MUTATIONS)
def test_broken_flags_are_seen(name):
    assert not keeps_the_rules(mutated(capture_module, *FLAG_MUTATIONS[name]))


@pytest.mark.parametrize("seed", range(3))
def test_lanes_do_not_change_a_number(tiny_dir, seed):
    """Overlapped or serial: the same bits, since only streams differ."""
    tokens = torch.randint(0, 250, (9,), generator=torch.Generator().manual_seed(seed)).tolist()
    results: list[torch.Tensor] = []
    for policy in ("serial", "overlap"):
        lanes = RecordingLanes() if policy == "overlap" else None
        steps = PagedSteps(load(tiny_dir("qwen2_moe"), shared_expert=policy, lanes=lanes))
        with capture_module.capture_mode("record", padded_batch_size=1) as flags:
            results += steps.step([("a", tokens)], flags=flags)
    assert torch.equal(*results)
