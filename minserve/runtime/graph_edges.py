"""The edges of a captured CUDA graph: between which kernels, and whether the later one may start before the earlier has ended.

Asks the CUDA driver by its C interface, since torch keeps its graphs to itself. Knows nothing of what was captured.
"""

from __future__ import annotations

import collections
import ctypes
import logging
from typing import Literal, NamedTuple

import torch

log = logging.getLogger("minserve.runtime")

_KERNEL, _PROGRAMMATIC = 0, 1
"""Of CUgraphNodeType and CUgraphDependencyType."""


class Edge(NamedTuple):
    """From one node to the next; a node is its kernel's name, or "" for what is no kernel."""

    before: str
    after: str
    kind: Literal["programmatic", "full"]


class _EdgeData(ctypes.Structure):
    """CUgraphEdgeData"""

    _fields_ = [
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    ]


class _KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2"""

    _fields_ = [
        ("function", ctypes.c_void_p),
        ("sizes", ctypes.c_uint * 7),
        ("arguments", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    ]


def edges_of(graph: torch.cuda.CUDAGraph) -> collections.Counter[Edge]:
    """How often each kind of edge is there. The graph must have been made with `keep_graph=True`.

    Empty, with a warning, where the driver does not tell: these calls came with CUDA 12.3.
    """
    try:
        return _edges(ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(graph.raw_cuda_graph()))
    except (OSError, AttributeError, _Refused) as error:
        log.warning("the CUDA driver does not tell a graph's edges: %s", error)
        return collections.Counter()


def _edges(driver: ctypes.CDLL, graph: ctypes.c_void_p) -> collections.Counter[Edge]:
    count = ctypes.c_size_t()
    _checked(driver.cuGraphGetEdges_v2(graph, None, None, None, ctypes.byref(count)))
    nodes = ctypes.c_void_p * count.value
    sources, targets, data = nodes(), nodes(), (_EdgeData * count.value)()
    _checked(driver.cuGraphGetEdges_v2(graph, sources, targets, data, ctypes.byref(count)))
    names = {node: _name(driver, node) for node in {*sources, *targets}}
    return collections.Counter(
        Edge(names[before], names[after], "programmatic" if edge.type == _PROGRAMMATIC else "full")
        for before, after, edge in zip(sources, targets, data, strict=True)
    )


def _name(driver: ctypes.CDLL, node: int | None) -> str:
    kind, params, name = ctypes.c_int(), _KernelNode(), ctypes.c_char_p()
    _checked(driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)))
    if kind.value != _KERNEL:
        return ""
    _checked(driver.cuGraphKernelNodeGetParams_v2(ctypes.c_void_p(node), ctypes.byref(params)))
    if params.function:
        _checked(driver.cuFuncGetName(ctypes.byref(name), ctypes.c_void_p(params.function)))
    else:
        _checked(driver.cuKernelGetName(ctypes.byref(name), ctypes.c_void_p(params.kernel)))
    return (name.value or b"").decode()


class _Refused(Exception):
    """A call of the driver failed."""


def _checked(status: int) -> None:
    if status:
        raise _Refused(f"error {status}")
