"""Proves that a set of views writes every byte of a model's state exactly once. Knows addresses and strides, no files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from torch import Tensor

from minserve.errors import CheckpointError
from minserve.models.destinations import Destination

_Bytes = np.ndarray[tuple[int], np.dtype[np.int64]]
_META_BEGIN = 1 << 56
"""More than any address of real memory."""


def prove_coverage(state: Mapping[str, Tensor], destinations: Sequence[Destination]) -> int:
    """Bytes of `state` (parameters and persistent buffers; tied ones count once), after proving that `destinations` write
    each of them exactly once.

    CheckpointError names the parameter that is left out, or the two tensors that would be written to one place.
    """
    memory = _Memory()
    begin, end, writer = memory.ranges(destination.target for destination in destinations)
    overlap = np.flatnonzero(begin[1:] < end[:-1])
    if overlap.size:
        first, second = (destinations[writer[overlap[0] + i]].name for i in (0, 1))
        raise CheckpointError(f"{first} and {second} would be written to the same place")
    written = _merge(begin, end)
    begin, end, _ = memory.ranges(state.values())
    wanted = _merge(begin, end)
    if not np.array_equal(written, wanted):
        raise CheckpointError(_first_difference(memory, state, destinations, wanted, written))
    return int((wanted[1] - wanted[0]).sum())


class _Memory:
    """Where tensors lie, as bytes of one space. On the meta device, where nothing has an address, storages get some."""

    def __init__(self) -> None:
        self._meta: dict[int, int] = {}
        self._meta_end = _META_BEGIN

    def ranges(self, views: Iterable[Tensor]) -> tuple[_Bytes, _Bytes, _Bytes]:
        """(begins, ends, index into views) of all contiguous byte runs, by rising begin."""
        begins: list[int] = []
        lengths: list[int] = []
        owners: list[int] = []
        for index, view in enumerate(views):
            if view.is_contiguous():
                begins.append(self._address(view))
                lengths.append(view.nbytes)
                owners.append(index)
            else:
                starts, length = _runs(view)
                begins += [self._address(view) + start for start in starts]
                lengths += [length] * len(starts)
                owners += [index] * len(starts)
        begin, size, owner = (np.array(values, np.int64) for values in (begins, lengths, owners))
        order = np.argsort(begin, kind="stable")
        order = order[size[order] > 0]
        return begin[order], (begin + size)[order], owner[order]

    def bytes_outside(self, view: Tensor, merged: _Bytes) -> int:
        """How many of the view's bytes merged ranges [2, n] leave out."""
        begin, end, _ = self.ranges([view])
        shared = np.minimum(end[:, None], merged[1]) - np.maximum(begin[:, None], merged[0])
        return view.nbytes - int(shared.clip(0).sum())

    def _address(self, view: Tensor) -> int:
        if not view.is_meta:
            return view.data_ptr()
        storage = view.untyped_storage()
        if storage._cdata not in self._meta:
            self._meta[storage._cdata] = self._meta_end
            self._meta_end += storage.nbytes()
        return self._meta[storage._cdata] + int(view.storage_offset()) * view.element_size()


def _first_difference(
    memory: _Memory, state: Mapping[str, Tensor], destinations: Sequence[Destination], wanted: _Bytes, written: _Bytes
) -> str:
    for destination in destinations:
        if surplus := memory.bytes_outside(destination.target, wanted):
            if surplus == destination.target.nbytes:
                return f"{destination.name} would be written to memory that is no parameter of the model"
            return f"{destination.name} would write {surplus:,} bytes outside of the model's parameters"
    name, parameter, missing = next((n, p, m) for n, p in state.items() if (m := memory.bytes_outside(p, written)))
    return f"{name}: {missing:,} of {parameter.nbytes:,} bytes are written by no tensor of the checkpoint"


def _merge(begin: _Bytes, end: _Bytes) -> _Bytes:
    """[2, n]: begins and ends of the union of ranges sorted by begin; touching ranges become one."""
    if not begin.size:
        return np.zeros((2, 0), np.int64)
    reach = np.maximum.accumulate(end)
    starts = np.concatenate([[True], begin[1:] > reach[:-1]])
    return np.stack([begin[starts], reach[np.concatenate([starts[1:], [True]])]])


def _runs(view: Tensor) -> tuple[list[int], int]:
    """(begins from the view's own, length) in bytes of a strided view's contiguous runs, in whatever order its dimensions are."""
    dimensions = sorted((stride, size) for stride, size in zip(view.stride(), view.shape, strict=True) if size > 1)
    run = 1
    while dimensions and dimensions[0][0] == run:
        run *= dimensions.pop(0)[1]
    begins = np.zeros(1, np.int64)
    for stride, size in dimensions:
        begins = (begins[:, None] + stride * np.arange(size, dtype=np.int64)).reshape(-1)
    return (begins * view.element_size()).tolist(), run * view.element_size()
