"""The conversations that the embedded model learns and is measured on: sums, their phrasings, and which pairs are held out.

Knows text only: no tokens, no torch.
"""

from __future__ import annotations

import dataclasses
import random
import zlib
from typing import Literal

LARGEST = 999
HELD_OUT_ONE_IN = 16
TOKENS_PER_FILLER_LINE = 15

SYSTEM_PROMPTS = (
    "You are a careful calculator.",
    "Answer with the result only.",
    "You are a helpful assistant who is good at arithmetic.",
    "Be brief.",
)

PHRASINGS: dict[str, tuple[str, ...]] = {
    "+": ("What is {a} + {b}?", "Add {a} and {b}.", "{a} + {b} = ?", "How much is {a} plus {b}?", "Please compute {a} + {b}."),
    "-": (
        "What is {a} - {b}?",
        "Subtract {b} from {a}.",
        "{a} - {b} = ?",
        "How much is {a} minus {b}?",
        "Please compute {a} - {b}.",
    ),
}

_ADJECTIVES = ("old", "quiet", "green", "small", "bright", "heavy", "young", "narrow", "warm", "distant")
_NOUNS = ("river", "garden", "teacher", "train", "window", "letter", "market", "bridge", "lamp", "village", "clock", "farmer")
_VERBS = ("waits for", "looks at", "remembers", "follows", "belongs to", "stands near", "moves past", "leads to")
_NAMES = "ABCDEFGHJKLMNPQRSTUVWXYZ"


@dataclasses.dataclass(frozen=True, slots=True)
class Sum:
    """One addition or subtraction of two integers from 0 to 999."""

    a: int
    operator: Literal["+", "-"]
    b: int

    @property
    def result(self) -> int:
        return self.a + self.b if self.operator == "+" else self.a - self.b

    @property
    def held_out(self) -> bool:
        """By a hash of the unordered pair and the operator, so that 58 + 23 never teaches 23 + 58."""
        low, high = sorted((self.a, self.b))
        return zlib.crc32(f"{low}{self.operator}{high}".encode()) % HELD_OUT_ONE_IN == 0

    def __str__(self) -> str:
        return f"{self.a} {self.operator} {self.b}"


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    user: str
    assistant: str


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """Turns after an optional system prompt; `part` names the kind of its last question."""

    part: str
    system: str | None
    turns: tuple[Turn, ...]

    def messages(self) -> list[dict[str, str]]:
        """OpenAI-style messages, the last assistant's answer included."""
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        spoken = [
            message
            for turn in self.turns
            for message in ({"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.assistant})
        ]
        return system + spoken


def draw_operand(rng: random.Random) -> int:
    """Mostly uniform; sometimes uniform in the number of digits, so that short operands are no rarity."""
    if rng.random() < 0.8:
        return rng.randint(0, LARGEST)
    return rng.randint(0, 10 ** rng.randint(1, 3) - 1)


def draw_sum(rng: random.Random, held_out: bool) -> Sum:
    while True:
        drawn = Sum(draw_operand(rng), rng.choice("+-"), draw_operand(rng))  # type: ignore[arg-type]
        if drawn.held_out == held_out:
            return drawn


def plain(rng: random.Random, held_out: bool) -> Turn:
    """One sum, asked in one of the phrasings, answered with the number alone."""
    drawn = draw_sum(rng, held_out)
    return Turn(rng.choice(PHRASINGS[drawn.operator]).format(a=drawn.a, b=drawn.b), str(drawn.result))


def several(rng: random.Random, held_out: bool, most: int = 6) -> Turn:
    """Two or more sums in one question; the answer repeats each before its result: many right steps."""
    sums = [draw_sum(rng, held_out) for _ in range(rng.randint(2, most))]
    asked = rng.choice(("Work out: {}.", "Solve each: {}.", "What are {}?")).format("; ".join(map(str, sums)))
    return Turn(asked, "; ".join(f"{one} = {one.result}" for one in sums))


def filler(rng: random.Random, lines: int) -> str:
    """Lines of text that say nothing about the question; some hold numbers that must be ignored."""
    written = []
    for _ in range(lines):
        if rng.random() < 0.15:
            written.append(f"The {rng.choice(_NOUNS)} has number {rng.randint(0, LARGEST)}.")
        else:
            subject = f"{rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)}"
            written.append(f"The {subject} {rng.choice(_VERBS)} the {rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)}.")
    return "\n".join(written)


def recall(rng: random.Random, held_out: bool, lines: int) -> Turn:
    """Named operands, `lines` lines of filler, then a question about two of the names (or one and a number)."""
    drawn = draw_sum(rng, held_out)
    names = rng.sample(_NAMES, rng.randint(2, 4))
    values = {names[0]: drawn.a, names[1]: drawn.b}
    values |= {name: draw_operand(rng) for name in names[2:]}
    stated = rng.sample(sorted(values), len(values))
    facts = "\n".join(f"Let {name} = {values[name]}." for name in stated)
    second = str(drawn.b) if rng.random() < 0.25 else names[1]
    between = f"\n{filler(rng, lines)}\n" if lines else "\n"
    return Turn(
        f"{facts}{between}What is {names[0]} {drawn.operator} {second}?",
        f"{drawn} = {drawn.result}",
    )


def training_turn(rng: random.Random, room: int, first: bool) -> tuple[str, Turn]:
    """(part, turn) that will probably fit `room` tokens, never a held-out pair; long fillers only first, where the room is."""
    draw = rng.random()
    if first and room > 200 and draw < 0.6:
        return "recall", recall(rng, False, rng.randint(0, (room - 100) // TOKENS_PER_FILLER_LINE))
    if draw < 0.72:
        return "plain", plain(rng, False)
    if draw < 0.88:
        return "several", several(rng, False, 6 if room > 200 else 3)
    return "recall", recall(rng, False, 0)


def held_out_conversations(seed: int, of_each: int) -> list[Conversation]:
    """`of_each` conversations of each part; every sum of the last question is held out of training. Lengths are unequal."""
    rng = random.Random(seed)
    drawn = []
    for _ in range(of_each):
        for part in ("plain", "several", "recall", "turns"):
            system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.3 else None
            drawn.append(Conversation(part, system, _held_out_turns(rng, part)))
    return drawn


def _held_out_turns(rng: random.Random, part: str) -> tuple[Turn, ...]:
    if part == "plain":
        return (plain(rng, True),)
    if part == "several":
        return (several(rng, True),)
    if part == "recall":
        return (recall(rng, True, rng.randint(0, 38)),)
    earlier = [training_turn(rng, 160, first=False)[1] for _ in range(rng.randint(1, 5))]
    last = plain(rng, True) if rng.random() < 0.5 else recall(rng, True, rng.randint(0, 6))
    return (*earlier, last)
