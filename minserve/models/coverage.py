"""Proves that a set of views writes every byte of a model's state exactly once. Knows storages and strides, no files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from torch import Tensor

from minserve.errors import CheckpointError
from minserve.models.destinations import Destination

_Bytes = np.ndarray[tuple[int], np.dtype[np.int64]]
_NamedViews = list[tuple[str, Tensor]]


def prove_coverage(state: Mapping[str, Tensor], destinations: Sequence[Destination]) -> int:
    """Bytes of `state` (parameters and persistent buffers; tied ones count once), after proving that `destinations` write
    each of them exactly once.

    CheckpointError names the parameter that is left out, or the two tensors that would be written to one place.
    """
    wanted = _by_storage(state.items())
    written = _by_storage((destination.name, destination.target) for destination in destinations)
    for address, views in written.items():
        if address not in wanted:
            raise CheckpointError(f"{views[0][0]} would be written to memory that is no parameter of the model")
    return sum(_prove_storage(parameters, written.get(address, [])) for address, parameters in wanted.items())


def _by_storage(tensors: Iterable[tuple[str, Tensor]]) -> dict[int, _NamedViews]:
    found: dict[int, _NamedViews] = {}
    for name, tensor in tensors:
        if tensor.numel():
            # On the meta device no memory has an address: there the storage object stands for it.
            begin = tensor.data_ptr() - int(tensor.storage_offset()) * tensor.element_size()
            found.setdefault(tensor.untyped_storage()._cdata if tensor.is_meta else begin, []).append((name, tensor))
    return found


def _prove_storage(parameters: _NamedViews, views: _NamedViews) -> int:
    begin, end, writer = _ranges(views)
    overlap = np.flatnonzero(begin[1:] < end[:-1])
    if overlap.size:
        first, second = (views[writer[overlap[0] + i]][0] for i in (0, 1))
        raise CheckpointError(f"{first} and {second} would be written to the same place")
    written = _merge(begin, end)
    begin, end, _ = _ranges(parameters)
    wanted = _merge(begin, end)
    if not np.array_equal(written, wanted):
        raise CheckpointError(_first_difference(parameters, views, wanted, written))
    return int((wanted[1] - wanted[0]).sum())


def _first_difference(parameters: _NamedViews, views: _NamedViews, wanted: _Bytes, written: _Bytes) -> str:
    for name, parameter in parameters:
        if missing := _bytes_outside(parameter, written):
            return f"{name}: {missing:,} of {parameter.nbytes:,} bytes are written by no tensor of the checkpoint"
    name, surplus = next((name, outside) for name, view in views if (outside := _bytes_outside(view, wanted)))
    return f"{name} would write {surplus:,} bytes outside of the model's parameters"


def _bytes_outside(view: Tensor, merged: _Bytes) -> int:
    """How many of its bytes merged ranges [2, n] leave out."""
    begin, end, _ = _ranges([("", view)])
    shared = np.minimum(end[:, None], merged[1]) - np.maximum(begin[:, None], merged[0])
    return view.nbytes - int(shared.clip(0).sum())


def _merge(begin: _Bytes, end: _Bytes) -> _Bytes:
    """[2, n]: begins and ends of the union of ranges sorted by begin; touching ranges become one."""
    if not begin.size:
        return np.zeros((2, 0), np.int64)
    reach = np.maximum.accumulate(end)
    starts = np.concatenate([[True], begin[1:] > reach[:-1]])
    return np.stack([begin[starts], reach[np.concatenate([starts[1:], [True]])]])


def _ranges(views: _NamedViews) -> tuple[_Bytes, _Bytes, _Bytes]:
    """(begins, ends, index into views) of all contiguous byte runs, by rising begin."""
    runs = [_runs(view) for _, view in views]
    begin = np.array([start for starts, _ in runs for start in starts], np.int64)
    counts = [len(starts) for starts, _ in runs]
    length = np.repeat(np.array([length for _, length in runs], np.int64), counts)
    owner = np.repeat(np.arange(len(runs)), counts)
    order = np.argsort(begin, kind="stable")
    return begin[order], (begin + length)[order], owner[order]


def _runs(view: Tensor) -> tuple[Sequence[int], int]:
    """(begins, length) in bytes of a strided view's contiguous runs, whatever the order of its dimensions."""
    if view.is_contiguous():
        return (int(view.storage_offset()) * view.element_size(),), view.numel() * view.element_size()
    dimensions = sorted((stride, size) for stride, size in zip(view.stride(), view.shape, strict=True) if size > 1)
    run = 1
    while dimensions and dimensions[0][0] == run:
        run *= dimensions.pop(0)[1]
    begins = np.array([view.storage_offset()], np.int64)
    for stride, size in dimensions:
        begins = (begins[:, None] + stride * np.arange(size, dtype=np.int64)).reshape(-1)
    return (begins * view.element_size()).tolist(), run * view.element_size()
