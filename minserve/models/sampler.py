"""Chooses the next token of every row, as part of the forward. Knows nothing of requests' text, of scheduling or of pages.

All that sampling depends on lies in buffers of fixed size, one row a slot, so that the same code runs eagerly and inside a
captured graph. N: rows of the step, V: vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from minserve.kernels import reference
from minserve.kernels.interface import Kernels
from minserve.models.logits_rules import lowest_kept, penalize, unpack_mask
from minserve.models.sampling_noise import log_exponential, row_keys, seed_key, token_id_steps
from minserve.request import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams

Variant = Literal["argmax", "general"]

ROWS_AT_ONCE = 64
"""The general variant and log-probabilities work through this many rows at a time: their temporaries are in fp32, and of the
variant's there are a dozen."""
LEAST_LOGPROB = -9999.0
"""Stands for minus infinity and NaN in reported log-probabilities, which JSON cannot carry."""

# Columns of SamplerState.reals and .integers.
_TEMPERATURE, _NOISE, _TOP_P, _MIN_P, _REPETITION, _FREQUENCY, _PRESENCE, _NUM_REALS = range(8)
_TOP_K, _MIN_TOKENS, _SEED_KEY, _NUM_INTEGERS = range(4)
_SPARSE = MAX_LOGIT_BIAS + MAX_STOP_TOKEN_IDS


class SamplerState:
    """The buffers. Slots 0 to max_slots - 1 belong to requests; slot `max_slots` is scratch for the padding of graphs.

    Only `set_slot`, `clear_slot`, `sample` and `take_back` write to them, always on the current stream.
    """

    def __init__(self, max_slots: int, vocab_size: int, device: torch.device, kernels: Kernels | None = None) -> None:
        """kernels: a stack of the device; None: plain torch."""
        rows = max_slots + 1
        self.kernels = kernels or reference.cpu()
        self.max_slots = max_slots
        self.vocab_size = vocab_size
        self.device = device
        self._neutral = [row.to(device) for row in _rows_of(SamplingParams(max_tokens=1, seed=0, temperature=0.0), vocab_size)]
        self.reals = self._neutral[0].repeat(rows, 1)
        """fp32 [slots + 1, ...]: the parameters, then what is added at `integers`' ids: biases, -inf for stop ids."""
        self.integers = self._neutral[1].repeat(rows, 1)
        """int64 [slots + 1, ...]: the parameters, then the ids of biases and of stop tokens."""
        self.output_index = torch.zeros(rows, dtype=torch.int32, device=device)
        """Output tokens that each slot's request has so far."""
        self.last_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        """The newest token of each slot: the next step's input, without a way over the host."""
        self.token_counts = torch.zeros(rows, vocab_size, dtype=torch.int32, device=device)
        """How often each id is in the output; meaningful only for slots with a penalty."""
        self.in_prompt = torch.zeros(rows, vocab_size, dtype=torch.bool, device=device)
        """Whether each id is in the prompt; meaningful only for slots with a repetition penalty."""
        self.broken_rows = torch.zeros(rows, dtype=torch.int32, device=device)
        """How often a token was drawn from each slot's logits though they had no finite maximum; it was 0 then."""
        self.one = torch.ones(1, dtype=torch.int32, device=device)
        self.id_steps = token_id_steps(vocab_size, device)

    @property
    def nan_rows(self) -> Tensor:
        """int64 []: such draws so far, padding not counted; summed on the device when asked for."""
        return self.broken_rows[: self.max_slots].sum()

    def set_slot(
        self, slot: int, params: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        """Gives the slot to a request. With the output so far, a preempted one goes on exactly as it would have.

        On a GPU nothing waits: small pinned copies, whose memory the allocator reuses only after the copy has run.
        Raises IndexError for a slot that is not there, ValueError for more biases or stop ids than the buffers hold.
        """
        if not 0 <= slot < self.max_slots:
            raise IndexError(f"slot {slot} is not one of {self.max_slots}")
        reals, integers = _rows_of(params, self.vocab_size)
        self.reals[slot].copy_(self._staged(reals), non_blocking=True)
        self.integers[slot].copy_(self._staged(integers), non_blocking=True)
        self.output_index[slot].fill_(len(output_token_ids))
        if params.repetition_penalty != 1.0:
            self.in_prompt[slot].zero_()
            if prompt_token_ids:
                self.in_prompt[slot].index_fill_(0, self._ids(prompt_token_ids), True)
        if _has_penalty(params):
            self.token_counts[slot].zero_()
            if output_token_ids:
                ids = self._ids(output_token_ids)
                self.token_counts[slot].index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

    def clear_slot(self, slot: int) -> None:
        """Takes the slot back; until it is set again it is greedy and without any rule."""
        self.reals[slot].copy_(self._neutral[0])
        self.integers[slot].copy_(self._neutral[1])

    def _ids(self, token_ids: Sequence[int]) -> Tensor:
        return self._staged(torch.frombuffer(array("q", token_ids), dtype=torch.int64)).to(self.device, non_blocking=True)

    def _staged(self, values: Tensor) -> Tensor:
        return values.pin_memory() if self.device.type == "cuda" else values


def needs_general(params: SamplingParams) -> bool:
    """Whether the request's tokens are anything but the argmax of raw logits, at its start at least."""
    banned = params.min_tokens > 0 and bool(params.stop_token_ids)
    return not params.greedy or banned or bool(params.logit_bias) or _has_penalty(params)


def sample(logits: Tensor, slots: Tensor, state: SamplerState, variant: Variant) -> Tensor:
    """The next token of each row: logits [N, V] of any type, slots int64 [N] -> int64 [N]. The logits are left as they are.

    A pure function of its arguments and the state's buffers, and capturable: only operations of fixed shapes. Writes
    `last_tokens`, `output_index`, `broken_rows` and `token_counts` of the slots. "argmax" ignores every parameter and is
    right when no row `needs_general`; in "general" greedy rows are the exact argmax of their processed logits. Ties go to the
    lowest id.
    """
    if variant == "argmax":
        # Two launches on a GPU, and one pass over the logits: at batch 1 a kernel costs as much as its launch.
        values, ids = state.kernels.part_maxima(logits)
    else:
        parts = [_draw(*rows, state) for rows in zip(logits.split(ROWS_AT_ONCE), slots.split(ROWS_AT_ONCE), strict=True)]
        values, ids = (torch.cat(column) for column in zip(*parts, strict=True))
    return state.kernels.record_tokens(
        values, ids, slots, state.last_tokens, state.output_index, state.broken_rows, state.token_counts
    )


def take_back(slots: Tensor, tokens: Tensor, state: SamplerState) -> None:
    """The tokens int64 [N] that `sample` has just recorded for these slots, so that others can be drawn instead, with the same
    random numbers. What was counted in `broken_rows` stays counted. Capturable."""
    less = -state.one.expand_as(slots)
    state.output_index.index_add_(0, slots, less)
    state.token_counts.view(-1).index_add_(0, torch.add(tokens, slots, alpha=state.vocab_size), less)


def sample_again(logits: Tensor, slots: Tensor, tokens: Tensor, allowed: Tensor, state: SamplerState, variant: Variant) -> Tensor:
    """Takes back the rows' tokens and draws from what is allowed: -> int64 [N].

    `logits` are those of the tokens; `allowed` int32 [N, W] as `unpack_mask` reads it.
    """
    take_back(slots, tokens, state)
    drawn = []
    for some, at, bits in zip(*(part.split(ROWS_AT_ONCE) for part in (logits, slots, allowed)), strict=True):
        possible = some.masked_fill(~unpack_mask(bits, state.vocab_size), -torch.inf)
        drawn.append(sample(possible, at, state, variant))
    return torch.cat(drawn)


def _draw(logits: Tensor, slots: Tensor, state: SamplerState) -> tuple[Tensor, Tensor]:
    """The general variant for a few rows -> (largest processed logit fp32 [n, 1], token [n, 1])."""
    reals, integers = state.reals[slots], state.integers[slots]
    output_index = state.output_index[slots].to(torch.int64)

    def real(column: int) -> Tensor:
        return reals[:, column : column + 1]

    additions = reals[:, _NUM_REALS:]
    banning = output_index.unsqueeze(1) < integers[:, _MIN_TOKENS : _MIN_TOKENS + 1]
    additions[:, MAX_LOGIT_BIAS:].masked_fill_(~banning, 0.0)
    values = logits.to(torch.float32, copy=True)
    values.scatter_add_(1, integers[:, _NUM_INTEGERS:], additions)  # unused entries are (0, 0.0)
    values = penalize(
        values, state.token_counts[slots], state.in_prompt[slots], real(_REPETITION), real(_FREQUENCY), real(_PRESENCE)
    )
    values = values / real(_TEMPERATURE)
    threshold = lowest_kept(values, integers[:, _TOP_K : _TOP_K + 1], real(_TOP_P), real(_MIN_P))

    # Gumbel-max: the largest of logit plus independent Gumbel numbers is a draw from the softmax. Greedy rows have noise 0.
    noise = log_exponential(row_keys(integers[:, _SEED_KEY], output_index), state.id_steps)
    scores = torch.addcmul(values, noise, real(_NOISE), value=-1.0).masked_fill_(values < threshold, -torch.inf)
    return values.amax(dim=-1, keepdim=True), scores.argmax(dim=-1, keepdim=True)


class Logprobs(NamedTuple):
    """Natural-log probabilities of the model itself, before any sampling rule."""

    logprobs: Tensor
    """fp32 [N]: of the given tokens."""
    ranks: Tensor
    """int64 [N]: 1 for the likeliest."""
    top_ids: Tensor
    """int64 [N, num_top], likeliest first."""
    top_logprobs: Tensor
    """fp32 [N, num_top]; where the given token is among them, its value is the same float as in `logprobs`."""


def gather_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    """Log-probabilities from raw logits [N, V] for token_ids int64 [N] and the `num_top` likeliest (0: none; at most V)."""
    pieces = zip(logits.split(ROWS_AT_ONCE), token_ids.split(ROWS_AT_ONCE), strict=True)
    gathered = [_logprobs_of_few(*rows, num_top) for rows in pieces]
    return gathered[0] if len(gathered) == 1 else Logprobs(*(torch.cat(column) for column in zip(*gathered, strict=True)))


def _logprobs_of_few(logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    logprobs = torch.log_softmax(logits.to(torch.float32), dim=-1).nan_to_num_(nan=LEAST_LOGPROB, neginf=LEAST_LOGPROB)
    own = logprobs.gather(1, token_ids.unsqueeze(1))
    ranks = (logprobs > own).sum(dim=-1) + 1
    top_logprobs, top_ids = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)
    return Logprobs(own.squeeze(1), ranks, top_ids, top_logprobs)


def _has_penalty(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


def _rows_of(params: SamplingParams, vocab_size: int) -> tuple[Tensor, Tensor]:
    """The request's row of `reals` and of `integers`, on the host."""
    # Stop ids beyond the vocabulary exist in published configs; they cannot be sampled, so there is nothing to ban.
    banned = [token_id for token_id in params.stop_token_ids if 0 <= token_id < vocab_size] if params.min_tokens else []
    if len(params.logit_bias) > MAX_LOGIT_BIAS or len(banned) > MAX_STOP_TOKEN_IDS:
        raise ValueError(f"at most {MAX_LOGIT_BIAS} logit biases and {MAX_STOP_TOKEN_IDS} stop ids with min_tokens are possible")
    reals = torch.zeros(_NUM_REALS + _SPARSE, dtype=torch.float32)
    integers = torch.zeros(_NUM_INTEGERS + _SPARSE, dtype=torch.int64)
    reals[_TEMPERATURE] = 1.0 if params.greedy else params.temperature
    reals[_NOISE] = 0.0 if params.greedy else 1.0
    reals[_TOP_P] = params.top_p
    reals[_MIN_P] = params.min_p
    reals[_REPETITION] = params.repetition_penalty
    reals[_FREQUENCY] = params.frequency_penalty
    reals[_PRESENCE] = params.presence_penalty
    integers[_TOP_K] = params.top_k
    integers[_MIN_TOKENS] = params.min_tokens
    integers[_SEED_KEY] = seed_key(params.seed)
    if biases := params.logit_bias:
        reals[_NUM_REALS : _NUM_REALS + len(biases)] = torch.tensor(list(biases.values()))
        integers[_NUM_INTEGERS : _NUM_INTEGERS + len(biases)] = torch.tensor(list(biases))
    if banned:
        first = MAX_LOGIT_BIAS
        reals[_NUM_REALS + first : _NUM_REALS + first + len(banned)] = -torch.inf
        integers[_NUM_INTEGERS + first : _NUM_INTEGERS + first + len(banned)] = torch.tensor(banned)
    return reals, integers
