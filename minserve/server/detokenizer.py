"""Token ids to text as they arrive: the incremental detokeniser and stop strings. Knows nothing of HTTP or of engines.

The pieces of text handed out, joined, are the decode of all tokens at once, however the tokens were grouped.
"""

from __future__ import annotations

import codecs
import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence

from minserve.server.answer_format import AnswerFormat, CallDelta, Part, Reasoning
from minserve.server.token_pieces import TokenPieces

_UNREADABLE = "\ufffd"


class Detokenizer:
    """Grows one text token by token, in constant time a token.

    `continues_text` is for output that goes on where a prompt ended: the rules for the front of a text (a dropped leading
    space) then do not apply.
    """

    def __init__(
        self,
        pieces: TokenPieces,
        *,
        skip_special_tokens: bool = True,
        continues_text: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """`shown`: special tokens that are text all the same."""
        self._pieces = pieces
        self._skipped = pieces.special - shown if skip_special_tokens else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._in_character = False
        self._byte_run = bytearray()
        self._at_first_token = not continues_text
        character, count = pieces.text_start_strip
        self._strip_character, self._strip_left = (character, 0 if continues_text else count)

    def push(self, token_id: int) -> str:
        """The text that is certain now and was not handed out before; may be empty."""
        if token_id in self._skipped or not 0 <= token_id < len(self._pieces.pieces):
            return ""
        if self._pieces.kind == "bytes":
            piece = self._pieces.pieces[token_id]
            if not self._in_character and piece.isascii():
                return piece.decode("ascii")
            text = self._utf8.decode(piece)
            self._in_character = bool(self._utf8.getstate()[0])
            return text
        if token_id in self._pieces.byte_tokens:
            self._at_first_token = False
            self._byte_run += self._pieces.piece(token_id)
            return ""
        return self._strip(self._take_byte_run() + self._text_piece(token_id))

    def flush(self) -> str:
        """What was held back, once no more tokens come: half a character becomes U+FFFD here and only here."""
        if self._pieces.kind == "bytes":
            return self._utf8.decode(b"", final=True)
        return self._strip(self._take_byte_run())

    def _text_piece(self, token_id: int) -> str:
        first, self._at_first_token = self._at_first_token, False
        if not first:
            return self._pieces.separator + self._pieces.pieces[token_id].decode()
        return (self._pieces.first_pieces or self._pieces.pieces)[token_id].decode()

    def _take_byte_run(self) -> str:
        run, self._byte_run = self._byte_run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return _UNREADABLE * len(run)

    def _strip(self, text: str) -> str:
        while self._strip_left and text:
            if text[0] != self._strip_character:
                self._strip_left = 0
                break
            text = text[1:]
            self._strip_left -= 1
        return text


@dataclasses.dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was found: which one, and how many tokens it took to complete it."""

    stop: str
    """Empty when not a string ended the text but a call beyond the one that was allowed."""
    num_tokens: int


class _Pattern:
    """One stop string and how much of it the text's end matches (Knuth, Morris and Pratt: constant time a character).

    The table grows with what has matched so far: made whole for each choice, long stop strings would hold up everybody.
    """

    __slots__ = ("_fallback", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._fallback = [0]

    def step(self, character: str) -> bool:
        """True when this character completes the pattern; it must not be stepped after that."""
        self.matched = self._continued(self.matched, character)
        if self.matched > len(self._fallback):
            self._fallback.append(self._continued(self._fallback[-1], character))
        return self.matched == len(self.text)

    def _continued(self, matched: int, character: str) -> int:
        """How much is matched after one more character."""
        while matched and self.text[matched] != character:
            matched = self._fallback[matched - 1]
        return matched + (self.text[matched] == character)


class StopChecker:
    """Holds text back while it can still be the start of a stop string, and ends at the match that starts earliest.

    Of two matches with the same start the shorter one wins. A match is settled only when no stop string that started before
    it can still be completed, so the outcome depends on the text alone and never on how it was cut.
    """

    def __init__(self, stop: Iterable[str], *, include_stop: bool = False) -> None:
        """Raises ValueError on an empty stop string."""
        self._open = [_Pattern(text) for text in dict.fromkeys(stop)]
        if not all(pattern.text for pattern in self._open):
            raise ValueError("a stop string must not be empty")
        self._include_stop = include_stop
        self._held = ""
        self.held_start = 0
        """Characters of the whole text that are settled: sent, or never to be sent."""
        self._length = 0
        self._best: tuple[int, int, str] | None = None  # start, end, stop string
        self.match: str | None = None
        """The stop string that ended the text; after that nothing more is handed out."""
        self.match_end = 0
        """Characters of the whole text up to the match's end."""

    def push(self, text: str) -> str:
        """The text that may be sent now."""
        if self.match is not None:
            return ""
        self._held += text
        for character in text:
            self._step(character)
            if self._best is not None and self._earliest_open() >= self._best[0]:
                return self._settle(self._best)
        return self._release(self._earliest_open())

    def finish(self) -> str:
        """The rest, once the text is complete: a pending match is settled, what only began like a stop string is sent."""
        if self.match is not None:
            return ""
        return self._release(self._length) if self._best is None else self._settle(self._best)

    def _step(self, character: str) -> None:
        self._length += 1
        completed = [pattern for pattern in self._open if pattern.step(character)]
        for pattern in completed:
            self._open.remove(pattern)
            found = (self._length - len(pattern.text), self._length, pattern.text)
            self._best = found if self._best is None else min(self._best, found)

    def _earliest_open(self) -> int:
        """Where the earliest unfinished stop string starts; the text's end when there is none."""
        return self._length - max((pattern.matched for pattern in self._open), default=0)

    def _settle(self, best: tuple[int, int, str]) -> str:
        start, end, self.match = best
        self.match_end = end
        return self._release(end if self._include_stop else start)

    def _release(self, end: int) -> str:
        count = end - self.held_start
        released, self._held = self._held[:count], self._held[count:]
        self.held_start = end
        return released


class TextStream:
    """One request's output: token ids in, sendable text out, stop strings obeyed.

    A stop token that ended the request and is not wanted in the text is simply not pushed by the caller.
    """

    def __init__(
        self,
        pieces: TokenPieces,
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        continues_text: bool = False,
        answer: AnswerFormat | None = None,
    ) -> None:
        """`min_tokens`: stop strings are looked for only in the text of later tokens. `answer`: read reasoning and tool calls."""
        answer = answer or AnswerFormat()
        self._detokenizer = Detokenizer(
            pieces, skip_special_tokens=skip_special_tokens, continues_text=continues_text, shown=answer.shown_token_ids
        )
        self._reader = answer.reader()
        self._all_content = self._reader.all_content
        self._stop, self._include_stop = tuple(stop), include_stop
        self._checker = self._new_checker()
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._checked_length = 0
        self._boundaries: deque[tuple[int, int]] = deque()  # characters checked after a token, and that token's count
        self.stopped: StopMatch | None = None
        """Set when a stop string was found; later tokens are ignored."""
        self.num_reasoning_tokens = 0
        self.aside: list[Reasoning | CallDelta] = []
        """What was read since the last call of `take_aside` and is not content."""

    @property
    def num_tokens(self) -> int:
        """Tokens pushed so far, up to a stop."""
        return self._num_tokens if self.stopped is None else self.stopped.num_tokens

    def push(self, token_ids: Iterable[int]) -> str:
        """The text to send now, possibly empty: never a part of a stop string, never half a character."""
        return "".join([self.push_token(token_id) for token_id in token_ids])

    def push_token(self, token_id: int) -> str:
        """The same for one token."""
        if self.stopped is not None:
            return ""
        self._num_tokens += 1
        text = self._detokenizer.push(token_id)
        if not text:
            return ""
        if self._all_content:
            return text if self._checker is None else self._check(text)
        return self._read(text)

    def take_aside(self) -> list[Reasoning | CallDelta]:
        taken, self.aside = self.aside, []
        return taken

    def finish(self) -> str:
        """The rest, once the request has ended; `stopped` may still be set by it."""
        if self.stopped is not None:
            return ""
        text = self._detokenizer.flush()
        sendable = self._read(text) if text else ""
        return sendable + self._sort(self._reader.finish()) + self._settle_content()

    def _read(self, text: str) -> str:
        sendable = self._sort(self._reader.push(text))
        if self._reader.reasoned:
            self.num_reasoning_tokens = self._num_tokens
        if self._reader.over and self.stopped is None:
            self.stopped = StopMatch("", self._num_tokens)
        self._all_content = self._reader.all_content
        return sendable

    def _sort(self, parts: Iterable[Part]) -> str:
        """The content among the parts, checked; the others go aside. A call ends the content before it."""
        sendable = ""
        for part in parts:
            if self.stopped is not None:
                break
            if isinstance(part, str):
                sendable += self._check(part)
                continue
            sendable += self._settle_content()
            if self.stopped is None:
                self.aside.append(part)
        return sendable

    def _settle_content(self) -> str:
        """What the checker holds of the content so far. Content that comes later is checked afresh."""
        if self._checker is None or self.stopped is not None:
            return ""
        sendable = self._checker.finish()
        self._note_stop(self._checker)
        if self.stopped is None:
            self._checker = self._new_checker()
            self._checked_length = 0
            self._boundaries.clear()
        return sendable

    def _new_checker(self) -> StopChecker | None:
        return StopChecker(self._stop, include_stop=self._include_stop) if self._stop else None

    def _check(self, text: str) -> str:
        if self._checker is None or self._num_tokens <= self._min_tokens:
            return text
        self._checked_length += len(text)
        self._boundaries.append((self._checked_length, self._num_tokens))
        sendable = self._checker.push(text)
        self._note_stop(self._checker)
        while self._boundaries and self._boundaries[0][0] <= self._checker.held_start:
            self._boundaries.popleft()
        return sendable

    def _note_stop(self, checker: StopChecker) -> None:
        if checker.match is not None:
            num_tokens = next(count for length, count in self._boundaries if length >= checker.match_end)
            self.stopped = StopMatch(checker.match, num_tokens)
