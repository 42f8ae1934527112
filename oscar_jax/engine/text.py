"""Token ids to text as they come: whole characters only, cut at the first stop string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from oscar_jax.models.tokenizer import Tokenizer


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
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), include_stop: bool = False
    ) -> None:
        if any(not text for text in stop):
            raise ValueError(f"TextStream stop={list(stop)!r}: a stop string must not be empty")
        self.stopped = False
        self.consumed = 0  # ids that count: up to the one that completed a stop string
        self._stream = tokenizer.stream()
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._held = ""

    def push(self, ids: Iterable[int]) -> tuple[str, bool]:
        """Add ids; returns the text that is now certain, and whether a stop string ended it.

        Ids after the one that completed a stop string are not consumed (see ``consumed``).
        """
        certain = []
        for id in ids:
            if self.stopped:
                break
            self.consumed += 1
            if piece := self._stream.push(id):
                certain.append(self._advance(piece))
        return "".join(certain), self.stopped

    def flush(self) -> str:
        """The rest once no ids will follow: what was held back, and U+FFFD for a cut character."""
        if self.stopped:
            return ""
        certain = self._advance(self._stream.flush())
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
