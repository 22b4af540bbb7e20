"""Random numbers that depend on nothing but (seed, output index, token id). Knows nothing of logits or of sampling rules.

The same numbers come at any row of any batch and again after a preemption, inside a CUDA graph or not: they are computed
with integer tensor arithmetic from counters, and no generator state exists. The arithmetic is SplitMix64's (Steele, Lea and
Flood, 2014), twice: the output index counts through the sequence of the seed, the token id through the sequence of that key.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 1 << 64
_STEP = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_UNIT_BITS = 40


def seed_key(seed: int) -> int:
    """A request's seed as a well mixed int64, so that neighbouring seeds share nothing."""
    word = (seed + _STEP) % _WORD
    word = (word ^ (word >> 30)) * _MIX_1 % _WORD
    word = (word ^ (word >> 27)) * _MIX_2 % _WORD
    return _signed(word ^ (word >> 31))


def token_id_steps(vocab_size: int, device: torch.device) -> Tensor:
    """int64 [vocab_size]: what each token id adds to a row's key; computed once."""
    return torch.arange(vocab_size, dtype=torch.int64, device=device) * _signed(_STEP)


def row_keys(seed_keys: Tensor, output_indexes: Tensor) -> Tensor:
    """int64 [N] each -> int64 [N]: one key for each (seed, output index)."""
    return _mix(seed_keys + output_indexes * _signed(_STEP))


def log_exponential(keys: Tensor, id_steps: Tensor) -> Tensor:
    """Logarithms of independent standard exponential numbers, fp32 [N, V]; their negatives are standard Gumbel numbers.

    Always finite: between log(2**-41) and log(17). The uniform numbers behind them have 40 bits, finest near 0, because
    the smallest exponentials decide which token wins.
    """
    bits = _logical_shift(_mix(keys.unsqueeze(1) + id_steps), 64 - _UNIT_BITS)
    negative_uniform = bits.to(torch.float32).mul_(-(2.0**-_UNIT_BITS))
    # Rounding could give 0 or 1, whose logarithms are infinite.
    negative_uniform.clamp_(-(1.0 - 2.0**-24), -(2.0 ** -(_UNIT_BITS + 1)))
    return negative_uniform.log1p_().neg_().log_()


def _mix(words: Tensor) -> Tensor:
    """SplitMix64's finaliser on a tensor that the caller gives up."""
    words.bitwise_xor_(_logical_shift(words, 30)).mul_(_signed(_MIX_1))
    words.bitwise_xor_(_logical_shift(words, 27)).mul_(_signed(_MIX_2))
    return words.bitwise_xor_(_logical_shift(words, 31))


def _logical_shift(words: Tensor, count: int) -> Tensor:
    """Right shift that fills with zeros; torch's own repeats the sign bit."""
    return (words >> count).bitwise_and_((1 << (64 - count)) - 1)


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word
