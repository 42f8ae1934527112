"""Who runs next: sequences, their slots and pages, first come first served."""

from __future__ import annotations

import dataclasses
from collections import deque

from oscar_jax.engine.blocks import BlockManager
from oscar_jax.engine.request import Request
from oscar_jax.engine.text import TextStream
from pallas_kernels.format import PAGE
from pallas_kernels.layout import Windows


@dataclasses.dataclass
class Sequence:
    """A request on its way: its tokens so far and what of them is on the device."""

    request: Request
    text: TextStream
    stop_ids: frozenset[int]
    tokens: list[int]  # prompt, then everything generated
    slot: int = -1  # of ring, sink and state; -1 while waiting
    pages: list[int] = dataclasses.field(default_factory=list)
    prefilled: int = 0  # tokens whose prefill was dispatched
    target: int = 0  # tokens to prefill: the prompt, or after a restart all but the unread
    in_flight: int = 0  # tokens dispatched and not read, an upper bound
    pages_written: int = 0

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def end(self) -> int:
        """Tokens, prompt included, at which the sequence stops whatever it says."""
        return self.prompt_len + self.request.params.max_tokens

    @property
    def decodes(self) -> bool:
        """The prompt is in, and a token may be missing even if all that is in flight comes."""
        prefilled = self.slot >= 0 and self.prefilled == self.target
        return prefilled and len(self.tokens) + self.in_flight < self.end


class Scheduler:
    """Slots and pages for the sequences at the head of the queue.

    A sequence is admitted when a slot is free and the pages of its longest possible outcome are:
    what runs never has to give way.

    Args:
        slots: most sequences at once. blocks: the pool's pages. windows: how many pages n tokens
            need.
    """

    def __init__(self, slots: int, blocks: BlockManager, windows: Windows) -> None:
        self.blocks = blocks
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order of admission
        self._free_slots = list(range(slots - 1, -1, -1))
        self._windows = windows

    def pages_needed(self, tokens: int) -> int:
        """Pages for a sequence that ends with ``tokens`` tokens; the last is never cached."""
        return max(0, (tokens - 1 - self._windows.sink) // PAGE)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def admit(self) -> None:
        """Give slots and pages to waiting sequences, in order, while there are any."""
        while self.waiting and self._free_slots:
            sequence = self.waiting[0]
            pages = self.blocks.allocate(self.pages_needed(sequence.end))
            if pages is None:
                return
            sequence.pages = pages
            sequence.slot = self._free_slots.pop()
            sequence.prefilled, sequence.pages_written = 0, 0
            sequence.target = len(sequence.tokens)
            self.running.append(self.waiting.popleft())

    def release(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free what it holds."""
        if sequence.slot < 0:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self.blocks.release(sequence.pages)
        self._free_slots.append(sequence.slot)
        sequence.slot, sequence.pages = -1, []

    def requeue_all(self) -> None:
        """Put everything that runs back at the head of the queue, oldest first."""
        for sequence in reversed(list(self.running)):
            self.release(sequence)
            sequence.in_flight = 0
            self.waiting.appendleft(sequence)

    def prefilling(self) -> Sequence | None:
        """The oldest sequence with prompt tokens left to compute."""
        return next((s for s in self.running if s.prefilled < s.target), None)

    def decoding(self) -> list[Sequence]:
        """Sequences that want tokens."""
        return [s for s in self.running if s.decodes]

    def find(self, request_id: str) -> Sequence | None:
        return next((s for s in (*self.running, *self.waiting) if s.request.id == request_id), None)
