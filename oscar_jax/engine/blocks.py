"""Which pages of the pool are free, and who owns the others."""

from __future__ import annotations

from collections.abc import Iterable


class BlockManager:
    """Hands out page ids; every id is free or owned by exactly one sequence.

    >>> blocks = BlockManager(4)
    >>> owned = blocks.allocate(3)
    >>> blocks.free_count, blocks.allocate(2) is None
    (1, True)
    >>> blocks.release(owned)
    >>> blocks.free_count
    4
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))  # popped from the end: low ids first
        self._owned: set[int] = set()

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def used_count(self) -> int:
        return len(self._owned)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` page ids, or None when fewer are free: all or nothing."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        self._owned.update(pages)
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Give pages back.

        Raises:
            RuntimeError: a page is not owned; its content could belong to somebody else by now.
        """
        for page in pages:
            if page not in self._owned:
                raise RuntimeError(f"page {page} was released but is not owned by any sequence")
            self._owned.remove(page)
            self._free.append(page)
