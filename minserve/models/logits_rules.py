"""What a request may do to its logits before a token is drawn, as pure functions of tensors. Knows nothing of requests.

N rows, V token ids. Every function is row by row, of fixed shapes, without a host sync. Masses are summed as integers, which
no order of summation can change, so that a row's outcome does not depend on the rows beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASS_UNIT = 2.0**36
"""Integer mass of the likeliest token. All of N * V tokens stay under 2**62: 64 rows of a million."""
_ALL = (1 << 63) - 1


def unpack_mask(words: Tensor, vocab_size: int) -> Tensor:
    """int32 [N, W], bit i of word w for the id 32 w + i -> bool [N, V]."""
    octets = words.view(torch.uint8).unsqueeze(-1)
    places = torch.arange(8, dtype=torch.uint8, device=words.device)
    return ((octets >> places) & 1).view(words.shape[0], -1)[:, :vocab_size].bool()


def penalize(
    logits: Tensor, counts: Tensor, in_prompt: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> Tensor:
    """Repetition, frequency and presence penalties; each [N, 1] fp32 and without effect at 1, 0 and 0.

    `counts` int32 [N, V]: how often each id is in the output. `in_prompt` bool [N, V]. Repetition (CTRL, arXiv:1909.05858)
    looks at prompt and output and divides positive logits, multiplies negative ones; the other two are OpenAI's and look
    at the output alone: logit - count * frequency - (count > 0) * presence.
    """
    in_output = counts > 0
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(in_output | in_prompt, repeated, logits)
    return logits - counts * frequency - in_output * presence


def lowest_kept(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The smallest logit [N, 1] that survives top_k, then top_p among those, then min_p; all arguments are [N, 1].

    A token survives top_k when fewer than k ids are likelier (k <= 0: off), top_p when the ids likelier than it hold less
    than top_p of what top_k left (1: off), min_p when its probability is at least min_p times the largest (0: off). Ids of
    equal logits survive or fall together, and the likeliest always survives.
    """
    vocab_size = logits.shape[-1]
    ordered = logits.sort(dim=-1, descending=True).values
    largest = ordered[:, :1]
    last_rank = torch.where((top_k <= 0) | (top_k > vocab_size), vocab_size, top_k) - 1
    by_top_k = ordered.gather(1, last_rank)

    mass = (ordered - largest).exp_().mul_(_MASS_UNIT).to(torch.int64).masked_fill_(ordered < by_top_k, 0)
    # One long sum over all rows is far faster on a GPU than one for each row, and with integers just as exact. A broken row
    # adds multiples of 2**63 (what NaN becomes), which leaves the order within later rows as it is.
    up_to = mass.view(-1).cumsum(dim=0).view_as(mass)
    before_row = up_to[:, :1] - mass[:, :1]
    limit = ((up_to[:, -1:] - before_row).to(torch.float64) * top_p).ceil_().to(torch.int64)
    limit = torch.where(top_p >= 1.0, _ALL, limit + before_row)
    num_kept = (up_to - mass < limit).sum(dim=-1, keepdim=True)
    # A row of NaN keeps nothing; the index must be legal there too.
    by_top_p = ordered.gather(1, (num_kept - 1).clamp_(min=0))

    by_min_p = largest + min_p.log()
    return torch.maximum(torch.maximum(by_top_k, by_top_p), by_min_p)
