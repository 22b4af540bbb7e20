"""How many prompt tokens may ride with decode rows, so that these get their next token in time. Knows seconds and counts alone.

Learns from the steps that ran: what a step of decode rows takes, and what prompt tokens added to it. It assumes no machine.
"""

from __future__ import annotations

from collections.abc import Sequence

LEAST_TOKENS = 16
"""Prompts get on by this many tokens a step, whatever that takes."""
REFRESH_STEPS = 32
"""Steps in a row with prompt tokens in them, after which one goes without, so that the decode step's own time stays known."""
HEADROOM = 0.9
"""Of the time that is allowed; the aim, because times vary."""
BEYOND_LEAST = 1.25
"""Where the least piece alone takes longer than allowed, steps may take this much more than with the least piece: on a device
where any prompt token costs the same fixed time, tiny pieces would starve the prompts and win nothing."""
STEP_TOKENS = 1024
"""What any step that reads prompts takes, in tokens of a large one: however few they are, they read nearly all experts."""
FORGET = 0.9995
"""Of what the least piece took, for each step that did not tell it anew."""


class PrefillPace:
    """The number of prompt tokens that goes beside decode rows, set after each step by what it took."""

    def __init__(self, ratio: float, most: int, floor_seconds: float = 0.0, step_sizes: Sequence[int] = ()) -> None:
        """A step with prompt tokens in it may take `ratio` times what its decode rows take alone, or `floor_seconds` if that is
        more. most: tokens of any step. step_sizes: the tokens to which steps are padded, ascending; none: they are not."""
        self._ratio = ratio
        self._floor_seconds = floor_seconds
        self._step_sizes = step_sizes
        self._most = most
        self._tokens = float(min(most, 1024 if floor_seconds else 4 * LEAST_TOKENS))
        self._decode_seconds: dict[int, float] = {}
        """By the binary length of the number of decode rows."""
        self._least_ratio = 1.0
        """What steps with the least piece take, in decode steps; one slow step alone is not believed."""
        self._mixed_in_a_row = 0
        self._measures = False

    def tokens(self, num_decode_rows: int) -> int:
        """Prompt tokens for the next step; 0 when this one shall show what its decode rows take alone."""
        if not num_decode_rows or not (self._measures or self._floor_seconds):
            return self._most
        if self._mixed_in_a_row >= REFRESH_STEPS or num_decode_rows.bit_length() not in self._decode_seconds:
            return 0
        return self._fit(num_decode_rows)

    def _fit(self, num_decode_rows: int) -> int:
        """What fits, in a step without padding if there is one."""
        tokens = max(1, min(self._most, int(self._tokens)))
        full = [size - num_decode_rows for size in self._step_sizes if num_decode_rows < size <= num_decode_rows + tokens]
        return full[-1] if full else tokens

    def worth_reading(self, num_decode_rows: int, num_prompt_tokens: int) -> int:
        """Of the prompt tokens that the next step could hold, those that it shall: fewer where two steps take less time than the
        padding of one."""
        tokens = num_decode_rows + num_prompt_tokens
        padded = next((size for size in self._step_sizes if size >= tokens), tokens)
        full = max((size for size in self._step_sizes if num_decode_rows < size < tokens), default=0)
        rest = next((size for size in self._step_sizes if size >= tokens - full + num_decode_rows), tokens)
        return full - num_decode_rows if full and full + rest + STEP_TOKENS <= padded else num_prompt_tokens

    def scheduled(self, num_decode_rows: int, num_prompt_tokens: int) -> None:
        """What the next step will be."""
        self._mixed_in_a_row = self._mixed_in_a_row + 1 if num_decode_rows and num_prompt_tokens else 0

    def measured(self, num_decode_rows: int, num_prompt_tokens: int, seconds: float) -> None:
        """What a step took."""
        self._measures = True
        if not num_decode_rows:
            return
        size = num_decode_rows.bit_length()
        if not num_prompt_tokens:
            before = self._decode_seconds.get(size, seconds)
            # A pause of the machine is forgotten at once, a batch that grew slower is believed after some steps.
            self._decode_seconds[size] = seconds if seconds < before else 0.8 * before + 0.2 * min(seconds, 2 * before)
        elif size in self._decode_seconds:
            self._adjust(
                self._decode_seconds[size], num_prompt_tokens, seconds, full=num_prompt_tokens >= self._fit(num_decode_rows)
            )

    def _adjust(self, decode_seconds: float, num_tokens: int, seconds: float, *, full: bool) -> None:
        """Aim at the tokens whose time, added to the decode rows', is what may be taken."""
        if num_tokens <= LEAST_TOKENS:
            before = self._least_ratio
            took = seconds / decode_seconds
            self._least_ratio = took if took < before else (before + min(took, 2 * before)) / 2
        else:
            self._least_ratio *= FORGET
        ratio = max(self._ratio, self._floor_seconds / decode_seconds)
        allowed = max(HEADROOM * ratio, BEYOND_LEAST * self._least_ratio if self._least_ratio > ratio else 0.0)
        added = max(seconds / decode_seconds - 1, 1e-3)
        aim = num_tokens * max(allowed - 1, 0.0) / added
        if aim < self._tokens:
            self._tokens = max(aim, self._tokens / 4, min(LEAST_TOKENS, self._most))
        elif full:  # a prompt's short rest says little of larger pieces
            self._tokens = min(aim, 1.5 * self._tokens, float(self._most))
