"""What the installed DeepEP can do for a model on a group of ranks, and why not more. Knows numbers; imports no library."""

from __future__ import annotations

import dataclasses

LOW_LATENCY_WIDTHS = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
"""Hidden sizes that tokenspeed-deepep 1.2.1 compiled its low-latency kernels for."""
MOST_TOP_K = 11
"""Of the same build's low-latency combine."""
NORMAL_RANKS = (2, 4, 8)
"""Ranks of one host that its normal kernels exist for."""
PROMPT_ROOM = 128
"""Tokens of prompts that may ride in a low-latency step beside all decode rows."""
ROW_BLOCK = 128
"""An expert's room is a multiple of it, the block of rows that the products compute."""


@dataclasses.dataclass(frozen=True, slots=True)
class Abilities:
    """What can be had."""

    low_latency_width: int | None
    """The hidden size that low-latency kernels move, the model's or the next one compiled; None: no low-latency mode."""
    normal: bool
    verdicts: tuple[str, ...]
    """A sentence for each thing that is not as one would expect."""


def abilities(hidden_size: int, top_k: int, num_ranks: int, ranks_per_host: int) -> Abilities:
    verdicts = []
    width = next((width for width in LOW_LATENCY_WIDTHS if width >= hidden_size), None)
    if width is None:
        verdicts.append(
            f"no low-latency mode: hidden size {hidden_size} is above the largest compiled one, {LOW_LATENCY_WIDTHS[-1]}"
        )
    elif top_k > MOST_TOP_K:
        width = None
        verdicts.append(f"no low-latency mode: top-k {top_k} is above {MOST_TOP_K}")
    elif width != hidden_size:
        verdicts.append(f"low-latency rows of {hidden_size} are padded to {width}, the next size that is compiled")
    normal = num_ranks == ranks_per_host and num_ranks in NORMAL_RANKS and hidden_size % 16 == 0
    if num_ranks != ranks_per_host:
        verdicts.append("no normal mode: it is built here for the ranks of one host, prompts go through low-latency mode")
    elif not normal:
        verdicts.append(
            f"no normal mode: it needs 2, 4 or 8 ranks and a hidden size of a multiple of 16 ({num_ranks}, {hidden_size})"
        )
    return Abilities(width, normal, tuple(verdicts))


SHARED_BLOCKS = 128
"""Thread blocks of the low-latency kernels that one GPU holds at once: each takes a multiprocessor and waits there for the other
ranks. Ranks that share a GPU must all find room, so each may have its part of them, one for an expert and one for a token."""


def capacity(max_num_seqs: int, sharers: int = 1) -> int:
    """Tokens that a rank may send in a low-latency step, the same in all steps and on all ranks: every decode row and some of a
    prompt's. `sharers`: ranks that have the same GPU."""
    if sharers > 1:
        return SHARED_BLOCKS // sharers
    decode_rows = -(-max_num_seqs // ROW_BLOCK) * ROW_BLOCK
    return decode_rows + PROMPT_ROOM
