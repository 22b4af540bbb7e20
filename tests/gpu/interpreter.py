"""Makes Triton's interpreter fit for these tests: bf16 and FP8 as a GPU has them, and no access beyond a launch's tensors.

The interpreter runs the programs of a launch one after the other, in numpy: it shows wrong masks, addresses, scales and sums,
and neither races nor what a compiler makes of the kernels. Knows no kernel.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

_STORED = {
    tl.bfloat16: (torch.bfloat16, numpy.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, numpy.uint8),
}
"""Types that the interpreter holds as bits: it multiplies them as integers, and rounds to them by cutting and a carry too few."""


def _widened(values: numpy.ndarray, kind: tl.dtype) -> numpy.ndarray:
    """As numbers that numpy knows."""
    if kind not in _STORED:
        return values
    return torch.from_numpy(numpy.ascontiguousarray(values)).view(_STORED[kind][0]).float().numpy().reshape(values.shape)


def _narrowed(values: numpy.ndarray, kind: tl.dtype) -> numpy.ndarray:
    """Rounded to the nearest, to even between two."""
    if kind not in _STORED:
        return values.astype(interpreter._get_np_dtype(kind))
    stored, bits = _STORED[kind]
    numbers = torch.from_numpy(numpy.ascontiguousarray(values, dtype=numpy.float32)).to(stored)
    return numbers.view(torch.uint8).numpy().view(bits).reshape(values.shape)


class Builder(interpreter.InterpreterBuilder):
    """The interpreter's operations, with what it lacks."""

    spans: tuple[tuple[int, int], ...] = ()
    """First byte of each tensor that the launch was given, and the one behind its last."""

    def __init__(self) -> None:
        super().__init__()
        # Its checks of each sum for 32 bits take a third of the time, and these tensors are small.
        self.options = interpreter.InterpreterOptions(sanitize_overflow=False)

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        return interpreter.TensorHandle(_narrowed(_widened(src.data, source), target), target)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        assert rounding_mode in (None, interpreter._ir.ROUNDING_MODE.RTNE)
        return self.cast_impl(src, dst_type)

    def create_dot(self, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        del input_precision, max_num_imprecise_acc
        factors = (_widened(side.data, side.dtype.scalar).astype(numpy.float32) for side in (a, b))
        return interpreter.TensorHandle(numpy.matmul(*factors) + d.data, d.dtype.scalar)

    def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Any:
        assert lhs.dtype.scalar not in _STORED and rhs.dtype.scalar not in _STORED, "numpy would add bits"
        result = super().binary_op(lhs, rhs, op)
        # A comparison's result claims its operands' type, and as a scalar becomes of it when it is spread over a block.
        return interpreter.TensorHandle(result.data, tl.int1) if result.data.dtype == numpy.bool_ else result

    def create_masked_load(self, ptrs: Any, mask: Any, *rest: Any) -> Any:
        self._check(ptrs, mask)
        return super().create_masked_load(ptrs, mask, *rest)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        self._check(ptrs, mask)
        return super().create_masked_store(ptrs, value, mask, *rest)

    def _check(self, ptrs: Any, mask: Any) -> None:
        """All addresses of one access lie in one tensor."""
        addresses = ptrs.data[mask.data]
        if addresses.size:
            first, last = int(addresses.min()), int(addresses.max()) + ptrs.get_element_ty().primitive_bitwidth // 8
            if not any(begin <= first and last <= end for begin, end in self.spans):
                raise IndexError(f"program {self.grid_idx} touches memory of no tensor, or of two at once")


def _span(tensor: Tensor) -> tuple[int, int]:
    if not tensor.numel():
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def install() -> None:
    """Once, for this process, before the first launch."""
    builder = Builder()
    interpreter.interpreter_builder = builder
    interpreter.interpreter_semantic.builder = builder
    plain_run, plain_patch = interpreter.InterpretedFunction.run, interpreter._patch_lang
    patched: set[int] = set()

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        builder.spans = tuple(_span(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        patched.clear()
        plain_run(self, *args, **kwargs)

    def patch_once(fn: Any) -> Any:
        """A launch patches the language at each call of a function: a third of its time, the first of each module apart."""
        if id(fn.__globals__) in patched:
            return None
        patched.add(id(fn.__globals__))
        scope = plain_patch(fn)
        scope.set_attr(tl.tensor, "__index__", lambda tensor: tensor.handle.data.item())  # Triton 3.6 and numpy 2.4 disagree
        return scope

    interpreter.InterpretedFunction.run, interpreter._patch_lang = run, patch_once
