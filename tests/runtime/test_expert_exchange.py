"""How the way of moving tokens is chosen: what was asked for against what DeepEP has for the model, without the library."""

from __future__ import annotations

import logging
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_ranks import gloo, together

from minserve.config import EMBEDDED_DIRECTORY, Config
from minserve.errors import EnvironmentFault, UsageError
from minserve.kernels import deep_ep_limits
from minserve.models.layers.dispatcher import DeepEPDispatcher, TorchDispatcher
from minserve.models.layers.placement import ExpertPlacement
from minserve.models.registry import load_model_config
from minserve.runtime import expert_exchange
from minserve.runtime.expert_exchange import Exchange
from minserve.runtime.parallel import Group
from minserve.runtime.step_agreement import StepAgreement
from minserve.seat import Seat

CPU = torch.device("cpu")
SHAPES = Path(__file__).parents[2] / "configs" / "shapes"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What DeepEP's buffers would have been made with."""
    calls: list[dict[str, Any]] = []

    class Buffer:
        def __init__(self, _group: Any, **options: Any) -> None:
            self.capacity = options["capacity"]
            calls.append(options)

    monkeypatch.setitem(sys.modules, "minserve.kernels.deep_ep_buffer", types.SimpleNamespace(DeepEPBuffer=Buffer))
    return calls


def connect(model: Path, stack: str = "hopper-ep", ranks: int = 2, hosts: int = 1, sharers: int = 1, **settings: Any) -> Exchange:
    """Rank 0's; the group has two ranks in truth."""
    store, config = dist.HashStore(), load_model_config(model)
    collectives = together(2, lambda rank: gloo(store, rank, 2))[0]
    seat = Seat(num_ranks=ranks, ranks_per_host=ranks // hosts)
    group = Group(seat, StepAgreement(0, {}), collectives, None, sharers)
    assert config.moe is not None
    placement = ExpertPlacement.spread(config.moe.num_experts, ranks, 0)
    return expert_exchange.connect(Config(ep_size=ranks, **settings), config, (placement, {}), stack, CPU, group)


def test_both_modes_where_the_library_has_both(made: list[dict[str, Any]]) -> None:
    exchange = connect(SHAPES / "deepseek-v3", max_num_seqs=256)
    assert made == [{"hidden_size": 7168, "width": 7168, "num_slots": 256, "capacity": 384, "normal": True}]
    assert isinstance(exchange.dispatcher, DeepEPDispatcher)
    assert (exchange.captured, exchange.low_latency_rows, exchange.name) == (True, 384, "DeepEP (auto)")
    config = Config(ep_size=2, max_num_seqs=256)
    assert exchange.adjusted(config) == config


def test_other_widths_are_padded_and_told(made: list[dict[str, Any]], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        connect(EMBEDDED_DIRECTORY)
    assert made[0]["width"] == 2048 and made[0]["hidden_size"] == 256
    assert "low-latency rows of 256 are padded to 2048" in caplog.text


@pytest.mark.parametrize(("ranks", "hosts"), [(16, 1), (4, 2)])
def test_without_a_normal_mode_prompts_are_cut_to_the_capacity(made: list[dict[str, Any]], ranks: int, hosts: int) -> None:
    exchange = connect(SHAPES / "deepseek-v3", ranks=ranks, hosts=hosts, max_num_seqs=64)
    assert made[0]["normal"] is False
    assert exchange.adjusted(Config(ep_size=ranks)).chunked_prefill_size == exchange.low_latency_rows == 256


def test_normal_mode_alone_captures_nothing(made: list[dict[str, Any]]) -> None:
    exchange = connect(SHAPES / "deepseek-v3", deepep_mode="normal")
    assert made[0]["width"] is None and exchange.low_latency_rows == 0
    assert exchange.adjusted(Config(ep_size=2)).enforce_eager


@pytest.mark.parametrize(
    ("ranks", "settings", "said"),
    [
        (16, {"deepep_mode": "normal"}, "--deepep-mode normal: no normal mode: it needs 2, 4 or 8 ranks"),
        (2, {"deepep_mode": "normal", "stack": "hopper-ep-torch"}, "DeepEP is not used here"),
    ],
)
def test_what_cannot_be_is_refused(made: list[dict[str, Any]], ranks: int, settings: dict[str, Any], said: str) -> None:
    stack = settings.get("stack", "hopper-ep")
    with pytest.raises(UsageError, match=said):
        connect(SHAPES / "deepseek-v3", stack=stack, ranks=ranks, deepep_mode=settings["deepep_mode"])
    assert not made


def test_a_model_that_low_latency_mode_cannot_move_goes_by_torch(
    made: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deep_ep_limits, "MOST_TOP_K", 7)
    exchange = connect(SHAPES / "deepseek-v3")
    assert isinstance(exchange.dispatcher, TorchDispatcher) and not made and exchange.captured
    with pytest.raises(UsageError, match="--moe-dispatcher deepep: no low-latency mode: top-k 8 is above 7"):
        connect(SHAPES / "deepseek-v3", moe_dispatcher="deepep")


def test_buffers_that_cannot_be_made_are_the_machines_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no peer access")

    monkeypatch.setitem(sys.modules, "minserve.kernels.deep_ep_buffer", types.SimpleNamespace(DeepEPBuffer=refuse))
    with pytest.raises(EnvironmentFault, match="no peer access; --moe-dispatcher torch does without"):
        connect(SHAPES / "deepseek-v3")


def test_ranks_that_share_a_gpu_must_fit_it_together(made: list[dict[str, Any]]) -> None:
    assert connect(EMBEDDED_DIRECTORY, sharers=2, max_num_seqs=64).low_latency_rows == 64
    for model, max_num_seqs in ((EMBEDDED_DIRECTORY, 65), (SHAPES / "deepseek-v3", 8)):
        with pytest.raises(UsageError, match="2 ranks on one GPU would wait for each other for ever"):
            connect(model, sharers=2, max_num_seqs=max_num_seqs)
    assert len(made) == 1


def test_widths_and_top_k_of_the_library() -> None:
    assert deep_ep_limits.abilities(7168, 8, 8, 8).verdicts == ()
    assert deep_ep_limits.abilities(3584, 8, 2, 2).low_latency_width == 4096
    assert deep_ep_limits.abilities(2304, 8, 2, 2).low_latency_width == 2560
    too_wide = deep_ep_limits.abilities(9216, 8, 2, 2)
    assert (
        too_wide.low_latency_width is None
        and too_wide.normal
        and "9216 is above the largest compiled one, 8192" in too_wide.verdicts[0]
    )
    assert deep_ep_limits.abilities(7168, 12, 2, 2).low_latency_width is None
    # Every decode row has room, and so have some tokens of a prompt; the rows of an expert are whole blocks.
    for max_num_seqs in (1, 64, 65, 128, 511):
        capacity = deep_ep_limits.capacity(max_num_seqs)
        assert max_num_seqs + 128 <= capacity < max_num_seqs + 256
        assert capacity % 128 == 0
