"""What a kernel stack offers to the models: types and signatures, no implementation.

A stack is one `Kernels` value: a table of callables. `reference.py` fills it with plain torch; the GPU stacks replace entries.
All tensors are contiguous unless a line says otherwise; "view" marks an input of up to three dimensions whose last one is
contiguous and whose others may be strided (a slice of a fused projection). T: tokens of the step, R: requests (rows) of the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

LEAST_MIXED_TOKENS = 256
"""The smallest mixed graph holds so many tokens, or fewer where steps are smaller, and serves steps of any number up to that.
Steps of a larger graph fill more than half of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the step's tokens stand. Built once a step; every layer reads it. Row r owns tokens query_start_loc[r]:[r+1].

    Padded rows of a decode graph have one token, seq_len 1 and a page table full of the dummy page 0. Those of a mixed graph are
    empty; tokens beyond the last row's end are padding of no row, and attention leaves them as they are.
    """

    query_start_loc: Tensor
    """int32 [R + 1]"""
    seq_lens: Tensor
    """int32 [R]: tokens in the cache once this step's are written."""
    page_table: Tensor
    """int32 [R, max_pages]; entries beyond the row's pages are 0."""
    slot_mapping: Tensor
    """int64 [T]: page * page_size + offset of each token."""
    page_size: int
    query_lens_host: tuple[int, ...]
    """The same as the device tensors, on the host, for planning without a sync."""
    seq_lens_host: tuple[int, ...]
    graph: bool = False
    """True for a step of a captured size, replayed or run eagerly for comparison: the tensors are the size's static buffers, at
    the same addresses each step, and `plan_attention` refreshes in place the one plan that the graph recorded."""

    @property
    def decode_only(self) -> bool:
        return all(length == 1 for length in self.query_lens_host)

    @property
    def one_token_each(self) -> bool:
        """Token t is row t's, and its last. A mixed graph's rows may by chance all have one token, but it has more tokens."""
        return self.decode_only and self.slot_mapping.shape[0] == len(self.query_lens_host)


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionShape:
    """What an attention planner needs to know of the model."""

    kind: Literal["gqa", "mla"]
    num_heads: int
    num_kv_heads: int
    """1 for mla."""
    head_dim: int
    """gqa: head size; mla: kv_lora_rank."""
    rope_dim: int
    """mla: qk_rope_head_dim, the second part of a cache entry; gqa: 0."""
    scale: float
    """Softmax scale, YaRN's factor included."""


@dataclasses.dataclass(frozen=True, slots=True)
class HeadNorms:
    """Root-mean-square norms of each query and key head, before their rotation."""

    q: Tensor
    """[D]"""
    k: Tensor
    """[D]"""
    eps: float


@dataclasses.dataclass(frozen=True, slots=True)
class RotaryTable:
    """The angles of all positions. The first `rot` dims of a head turn, the others pass."""

    cos_sin: Tensor
    """fp32 [max_positions, rot] = cat(cos, sin)"""
    interleaved: bool
    """Pairs (2i, 2i+1), else (i, i + rot/2)."""


@dataclasses.dataclass(frozen=True, slots=True)
class LinearWeight:
    """y = x W^T. `scale` is None for plain weights; FP8 weights carry fp32 [ceil(N/128), ceil(K/128)]: W = weight * scale."""

    weight: Tensor
    """[N, K]"""
    scale: Tensor | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Rows as a product with an FP8 weight reads them: each 128 columns of a row are `values` times one of `scales`."""

    values: Tensor
    """FP8 [T, K]; K is a multiple of 128."""
    scales: Tensor
    """fp32 [T, K / 128], rows fastest, columns a multiple of four rows apart: amax over 448, and amax is at least 1e-4."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The rank's experts, stacked by slot. Gate rows first, then up rows, not interleaved.

    In FP8, I is a multiple of 128: no block of scales holds gate and up rows.
    """

    w13: Tensor
    """[E, 2I, H]; INT4: int32 [E, 2I, H/8], eight values plus 8 in each, the lowest nibble first."""
    w2: Tensor
    """[E, H, I]; INT4: int32 [E, H, I/8]."""
    w13_scale: Tensor | None = None
    """FP8: fp32 [E, ceil(2I/128), ceil(H/128)]; INT4: floats [E, 2I, H/32]."""
    w2_scale: Tensor | None = None
    """FP8: fp32 [E, ceil(H/128), ceil(I/128)]; INT4: floats [E, H, I/32]."""

    @property
    def format(self) -> Literal["plain", "fp8_block", "int4_group"]:
        if self.w13_scale is None:
            return "plain"
        return "int4_group" if self.w13.dtype == torch.int32 else "fp8_block"


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertRows:
    """What the experts made of each token's slots, neither weighted nor summed: whoever reads the sum sums."""

    rows: Tensor
    """[T * k, H]: row t * k + j is of token t's slot j; unspecified where there is none."""
    slots: Tensor
    """int32 [T, k], negative for none"""
    weights: Tensor
    """fp32 [T, k]"""
    added: Tensor | None = None
    """[T, H], what is added to the rounded sum, unweighted: a shared expert's output."""


@dataclasses.dataclass(frozen=True, slots=True)
class PartialSums:
    """A linear layer's output, whose columns were multiplied in parts: whoever reads the sum sums, and rounds it."""

    parts: Tensor
    """fp32 [T, P, N]"""


Unsummed = ExpertRows | PartialSums
"""What `add_rms_norm` adds up itself, in order."""


@dataclasses.dataclass(frozen=True, slots=True)
class RouterConfig:
    """How logits become expert ids and weights."""

    top_k: int
    scoring: Literal["softmax", "sigmoid"]
    num_groups: int = 1
    top_k_groups: int = 1
    group_score: Literal["none", "max", "top2_sum"] = "none"
    """none: no group limit; max: DeepSeek-V2 group_limited_greedy; top2_sum: DeepSeek-V3 noaux_tc."""
    normalize: bool = False
    """Divide the chosen weights by their sum."""
    scale: float = 1.0
    """routed_scaling_factor as the family applies it; always folded into the weights here, exactly once."""
    always_on: int = 0
    """Slots behind the E routed experts' that every token takes as well, with weight 1: a shared expert's."""


Result = TypeVar("Result")
GqaDecode = Callable[
    [Tensor, HeadNorms | None, RotaryTable, Tensor, Tensor, AttentionMetadata, AttentionShape, Any],
    Result,
]


@dataclasses.dataclass(frozen=True, slots=True)
class Fp8RowKernels:
    """Entries that hand rows to a linear layer in FP8, so that it need not quantise them itself.

    Those named as an entry of `Kernels` take its inputs, and give what it gives, to the bit, quantised: K is the layer's width.
    """

    takes: Callable[[int, torch.dtype, LinearWeight, bool], bool]
    """(rows, their type, weight, by parts): whether `Kernels.linear`, or by parts `linear_parts`, would quantise so many. Only
    then may the others be called."""
    linear: Callable[[Fp8Rows, LinearWeight, Tensor | None], Tensor]
    """(x, weight, bias [N] or None) -> bf16 [T, N]"""
    rms_norm: Callable[[Tensor, Tensor, float], Fp8Rows]
    """x view [T, K]"""
    add_rms_norm: Callable[[Tensor | Unsummed, Tensor, Tensor, float], tuple[Fp8Rows, Tensor]]
    silu_and_mul: Callable[[Tensor], Fp8Rows]
    """[T, 2K] -> [T, K], which alone is not rounded before it is quantised."""
    heads_linear: Callable[[Tensor, Tensor], Fp8Rows]
    """-> [T, Hq * N]"""
    gqa_attention: Callable[[Tensor, Tensor, AttentionMetadata, AttentionShape, Any], Fp8Rows]
    """-> [T, Hq * D]"""
    gqa_decode: GqaDecode[Fp8Rows] | None = None
    """-> [T, Hq * D]"""


def _nothing_to_forget() -> None:
    """For stacks whose plans keep nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kernels:
    """One named stack. Each entry's contract is the reference's docstring in reference.py."""

    name: str
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """(x view [..., H], weight [H], eps) -> [..., H]; statistics in fp32."""
    add_rms_norm: Callable[[Tensor | Unsummed, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    """(x, residual, weight, eps) -> (normed, x + residual); the inputs are left as they are. Experts' rows, and what is
    added to them, and a product's parts are summed first, in fp32, and rounded."""
    silu_and_mul: Callable[[Tensor], Tensor]
    """[..., 2I] (gate | up) -> [..., I]"""
    linear: Callable[[Tensor, LinearWeight, Tensor | None], Tensor]
    """(x [..., K], weight, bias [N] or None) -> [..., N]"""
    linear_parts: Callable[[Tensor | Fp8Rows, LinearWeight], Tensor | PartialSums] | None
    """`linear` of x [T, K] without a bias, whose sum may be left to `add_rms_norm`, as is done where that is faster; FP8
    rows where `fp8_rows` takes them. None: it never is."""
    route: Callable[[Tensor, Tensor, Tensor | None, RouterConfig, Tensor | None], tuple[Tensor, Tensor]]
    """(x [T, H], weight fp32 or bf16 [E, H], correction_bias fp32 [E] or None, config, num_tokens int32 [1] or None) -> (topk_ids
    int32 [T, k], topk_weights fp32 [T, k]); k: top_k, then the always-on slots E, E + 1, ... From num_tokens on: -1 and 0."""
    experts_flat: Callable[..., Tensor]
    """(x [T, H], slots int32 [T, k], distinct in a token or -1, weights fp32 [T, k], experts) -> [T, H], weighted and summed.
    Where there is `quantize_rows`, a fifth argument may be its scales, with x its values."""
    expert_rows: Callable[..., Tensor | ExpertRows] | None
    """The same, whose sum may be left to `add_rms_norm`, as is done where that saves a launch; None: it never is."""
    experts_masked: Callable[..., Tensor]
    """(x [E, M, H], counts int32 [E], experts) -> [E, M, H]; rows at and beyond counts[e] are unspecified; not weighted. Where
    DeepEP belongs to the stack, a fourth argument may be FP8 rows' scales fp32 [E, M, H / 128], rows fastest."""
    gqa_inputs: Callable[[Tensor, HeadNorms | None, RotaryTable, Tensor, Tensor, Tensor, AttentionShape], Tensor]
    """(qkv [T, (Hq + 2 Hkv) D], norms, rotary, positions int64 [T], cache [pages, 2, page_size, Hkv, D], slot_mapping int64 [T],
    shape) -> queries [T, Hq, D], normed and turned; keys (likewise) and values are written to their slots."""
    mla_inputs: Callable[[Tensor, Tensor, Tensor, float, Tensor, RotaryTable, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """(q view [T, Hq, N + P], kv view [T, R + P], latent norm's weight [R], eps, w_uk view [Hq, N, R], rotary, positions int64
    [T], cache [pages, page_size, R + P], slot_mapping int64 [T]) -> (q_latent [T, Hq, R] = q's first part times w_uk, q_rope
    [T, Hq, P], turned); the normed latents and turned keys are written to their slots."""
    heads_linear: Callable[[Tensor, Tensor], Tensor]
    """(x [T, Hq, K], weight view [Hq, K, N] whose K is contiguous) -> [T, Hq, N], head by head."""
    plan_attention: Callable[[AttentionMetadata, AttentionShape], Any]
    """Host work before the forward, once a step, replays included, on the stream of the forward and outside any capture; its
    result is `ForwardContext.attention_plan` and the next two's last argument. With `metadata.graph` it is one object a size."""
    gqa_attention: Callable[[Tensor, Tensor, AttentionMetadata, AttentionShape, Any], Tensor]
    """(q [T, Hq, D], cache, metadata, shape, plan) -> [T, Hq, D]; causal within the row."""
    mla_attention: Callable[[Tensor, Tensor, Tensor, AttentionMetadata, AttentionShape, Any], Tensor]
    """(q_latent [T, Hq, R], q_rope [T, Hq, P], cache, metadata, shape, plan) -> [T, Hq, R]; absorbed form, causal."""
    part_maxima: Callable[[Tensor], tuple[Tensor, Tensor]]
    """logits [N, V] of any type -> (fp32 [N, S], ids int64 [N, S]): the largest of each of a row's S parts, in the order of ids,
    and the lowest id that has it; a part that holds a NaN gives NaN or infinity, and any id."""
    record_tokens: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    """(values fp32 [N, S], ids int64 [N, S], slots int64 [N], last_tokens int64, output_index int32, broken_rows int32, each
    [slots], token_counts int32 [slots, V]) -> tokens int64 [N], which those four are told of."""
    gqa_decode: GqaDecode[Tensor] | None = None
    """(qkv, norms, rotary, positions, cache, metadata, shape, plan) -> [T, Hq, D]: `gqa_inputs`, then `gqa_attention`, of a step
    with one token in each row, in one launch; None where there is no such kernel."""
    quantize_rows: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    """x [T, H] -> FP8 [T, H], scales fp32 [T, ceil(H / 128)]: for rows that travel to FP8 experts of other ranks."""
    fp8_rows: Fp8RowKernels | None = None
    """For a stack whose `linear` quantises rows for FP8 weights; None where it never does."""
    keeps_fp8: bool = False
    """True when `linear` and the experts take FP8 weights with their block scales; otherwise the loader widens them."""
    keeps_int4: bool = False
    """True when the experts take INT4 weights with their group scales; otherwise the loader widens them."""
    forget_graphs: Callable[[], None] = _nothing_to_forget
    """Call when captured graphs are destroyed: `plan_attention` then starts afresh with `metadata.graph`."""


KVLayerShape = tuple[int, ...]


def kv_page_shape(shape: AttentionShape, page_size: int) -> KVLayerShape:
    """Shape of one page of one layer's cache: gqa [2, page_size, Hkv, D], mla [page_size, R + P]."""
    if shape.kind == "mla":
        return (page_size, shape.head_dim + shape.rope_dim)
    return (2, page_size, shape.num_kv_heads, shape.head_dim)


def dtype_bytes(dtype: torch.dtype) -> int:
    return torch.empty((), dtype=dtype).element_size()
