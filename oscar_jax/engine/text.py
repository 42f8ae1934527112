"""Token ids to text as they come: whole characters only, cut at the first stop string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class IdStream(Protocol):
    """Incremental detokeniser of one sequence."""

    def push(self, id: int, /) -> str:
        """The characters that this id completes; empty while a character is incomplete."""
        ...


@runtime_checkable
class Detokenizer(Protocol):
    """What :class:`TextStream` needs of ``oscar_jax.models.tokenizer.Tokenizer``."""

    def stream(self) -> IdStream: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class TextStream:
    """The text of one growing sequence, without its stop string.

    The text ends where the first stop string *completes*: of all occurrences the one that ends
    first and, among those, the longest. So the result does not depend on how the text falls into
    tokens. What might still become a stop string (the longest suffix that begins one) is held
    back, nothing else is, so a stop string never leaks and plain text is never late.

    Args:
        tokenizer: whose ids these are.
        stop: stop strings, none of them empty.
        include_stop: keep the stop string itself as the end of the text.

    Raises:
        ValueError: an empty stop string.
    """

    def __init__(
        self, tokenizer: Detokenizer, stop: Sequence[str] = (), include_stop: bool = False
    ) -> None:
        if any(not text for text in stop):
            raise ValueError(f"TextStream stop={list(stop)!r}: a stop string must not be empty")
        self.stopped = False
        self._tokenizer = tokenizer
        self._stream = tokenizer.stream()
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._ids: list[int] = []
        self._decoded = 0  # characters the stream has given
        self._unfinished = False  # the newest ids gave no character yet
        self._held = ""

    @property
    def consumed(self) -> int:
        """Ids that count: all that were pushed, up to the one that completed a stop string."""
        return len(self._ids)

    def push(self, ids: Iterable[int]) -> tuple[str, bool]:
        """Add ids; returns the text that is now certain, and whether a stop string ended it.

        Ids after the one that completed a stop string are not consumed (see ``consumed``).
        """
        certain = []
        for id in ids:
            if self.stopped:
                break
            self._ids.append(id)
            piece = self._stream.push(id)
            self._decoded += len(piece)
            self._unfinished = not piece
            if piece:
                certain.append(self._advance(piece))
        return "".join(certain), self.stopped

    def flush(self) -> str:
        """The rest once no ids will follow: what was held back, and U+FFFD for a cut character."""
        if self.stopped:
            return ""
        rest = ""
        if self._unfinished:
            rest = self._tokenizer.decode(self._ids, skip_special_tokens=True)[self._decoded :]
        certain = self._advance(rest)
        held, self._held = self._held, ""
        return certain + held

    def _advance(self, piece: str) -> str:
        pending = self._held + piece
        self._held = ""
        found = [(at + len(text), at) for text in self._stop if (at := pending.find(text)) >= 0]
        if found:
            end, start = min(found)
            self.stopped = True
            return pending[: end if self._include_stop else start]
        keep = self._possible_stop(pending)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def _possible_stop(self, pending: str) -> int:
        """Length of the longest suffix of ``pending`` that begins a stop string."""
        longest = max((len(text) for text in self._stop), default=1) - 1
        for length in range(min(longest, len(pending)), 0, -1):
            suffix = pending[-length:]
            if any(text.startswith(suffix) for text in self._stop):
                return length
        return 0
