"""Hands out pages to requests, and takes them back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvpool.layout import PoolLayout, RequestAddress, Span

Ints = npt.NDArray[np.int64]


class OutOfPages(RuntimeError):
    """Fewer pages are free than were asked for; nothing was changed."""


class HasLayout(Protocol):
    """A pool, as far as an allocator needs to know it."""

    layout: PoolLayout


@dataclass(slots=True, eq=False)
class Request:
    """One request's tokens and the pages that hold them."""

    num_tokens: int = 0
    pages: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    freed: bool = False

    def address(self) -> RequestAddress:
        """Where the tokens lie now, as plans read it. Raises ValueError once freed."""
        if self.freed:
            raise ValueError("this request was freed: its pages are others' now.")
        return RequestAddress(self.num_tokens, {"kv": Span(self.pages)})


class Allocator:
    """Pages of the `kv` space of one pool. Page 0 is padding and is never handed out."""

    def __init__(self, pool: HasLayout) -> None:
        layout = pool.layout
        self.space = layout.space_by_name["kv"]
        self.num_pages = min(buffer.items for buffer in layout.buffers if buffer.space == "kv")
        # a stack, its top the lowest page: fresh requests get consecutive ids, which fuse
        self._free: Ints = np.arange(
            self.num_pages - 1, self.space.reserved - 1, -1, dtype=np.int64
        )
        self._num_free = self._free.size
        self._live: dict[int, Request] = {}

    @property
    def free_pages(self) -> int:
        """Pages that can still be handed out."""
        return self._num_free

    def new_request(self) -> Request:
        """A request without tokens."""
        request = Request()
        self._live[id(request)] = request
        return request

    def extend(self, request: Request, tokens: int) -> dict[str, Ints]:
        """Makes room for `tokens` more tokens; returns their flat entry locations by space.

        Locations are int64 `[tokens]`. Raises OutOfPages, and changes nothing, if too few pages are
        free.
        """
        return {space: rows[0] for space, rows in self.extend_batch([request], tokens).items()}

    def extend_batch(self, requests: Sequence[Request], tokens: int) -> dict[str, Ints]:
        """`extend` for each of a batch, all or none: int64 `[B, tokens]` by space."""
        for request in requests:
            self._check_live(request)
        if len({id(request) for request in requests}) != len(requests):
            raise ValueError("a request is named twice in the batch.")
        if tokens < 0:
            raise ValueError(f"tokens: 0 or more, got {tokens}. Requests do not shrink.")
        size = self.space.tokens_per_item
        missing = [-(-(r.num_tokens + tokens) // size) - r.pages.size for r in requests]
        if sum(missing) > self._num_free:
            raise OutOfPages(
                f"{sum(missing)} more pages of {size} tokens are needed, {self._num_free} of "
                f"{self.num_pages - self.space.reserved} are free. Free a request, or build a "
                "larger pool."
            )
        located = np.empty((len(requests), tokens), dtype=np.int64)
        for row, (request, count) in enumerate(zip(requests, missing)):
            self._num_free -= count
            fresh = self._free[self._num_free : self._num_free + count][::-1]
            request.pages = np.concatenate([request.pages, fresh])
            positions = np.arange(request.num_tokens, request.num_tokens + tokens, dtype=np.int64)
            request.num_tokens += tokens
            located[row] = self._locate(request, positions)
        return {"kv": located}

    def locations(self, request: Request) -> dict[str, Ints]:
        """Flat entry locations of all tokens of a request, int64 `[num_tokens]`, by space."""
        self._check_live(request)
        return {"kv": self._locate(request, np.arange(request.num_tokens, dtype=np.int64))}

    def free(self, request: Request) -> None:
        """Takes back all pages of a request."""
        self._check_live(request)
        del self._live[id(request)]
        count = request.pages.size
        self._free[self._num_free : self._num_free + count] = request.pages[::-1]
        self._num_free += count
        request.freed, request.pages, request.num_tokens = True, request.pages[:0], 0

    def check_integrity(self) -> None:
        """Every page is free or held by exactly one request; raises RuntimeError naming the first
        that is not.
        """
        held = [request.pages for request in self._live.values()]
        pages = np.concatenate([self._free[: self._num_free], *held])
        outside = pages[(pages < 0) | (pages >= self.num_pages)]
        if outside.size:
            raise RuntimeError(f"page {int(outside[0])} of {self.num_pages} is free or held.")
        counts = np.bincount(pages, minlength=self.num_pages)
        expected = np.arange(self.num_pages) >= self.space.reserved
        wrong = np.flatnonzero(counts != expected)
        if wrong.size:
            page = int(wrong[0])
            raise RuntimeError(
                f"page {page} is free or held {counts[page]} times, expected {int(expected[page])}."
            )

    def _locate(self, request: Request, positions: Ints) -> Ints:
        size = self.space.entries_per_item
        entries = positions // self.space.tokens_per_entry
        return request.pages[entries // size] * size + entries % size

    def _check_live(self, request: Request) -> None:
        if self._live.get(id(request)) is not request:
            raise ValueError("this request was freed, or belongs to another allocator.")
