"""Binding of one request in one call outside Python: `bind.c`, loaded by ctypes where it was
compiled. The plain path in `disagg.plan.bind` gives the same runs.

A page is bound in microseconds, where arrays of a few elements cost numpy as much each.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from disagg.plan.columns import Columns
from disagg.plan.runs import EntryRuns, Route, Runs
from kvpool import _native
from kvpool.layout import PoolLayout, RequestAddress, Space
from kvpool.layout.grid import Ints

ABI = 1
KINDS = "paged", "slot", "ring"
COUNTS = "known", "unknown", "learned"
_REQUEST = struct.Struct("7q")


def _fields(kind: Any, *names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names]


class _Space(ctypes.Structure):
    _fields_ = _fields(
        ctypes.c_int64,
        *("kind", "list", "entries", "tokens", "steps", "window", "window_step", "wraps"),
        *("reserved", "items", "stretch", "rank", "ranks"),
    )


class _Pair(ctypes.Structure):
    _fields_ = (("src", _Space), ("dst", _Space), ("packed", ctypes.c_int64))


class _Runs(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_void_p, "src", "dst", "nbytes", "src_step", "dst_step"),
        ("count", ctypes.c_int64),
    )


class _Route(ctypes.Structure):
    _fields_ = (
        ("pair", ctypes.c_int64),
        *_fields(ctypes.c_void_p, "src_base", "dst_base", "layers"),
        *_fields(ctypes.c_int64, "bases", "src_stride", "dst_stride"),
        *_fields(ctypes.c_int64, "grows", "has_whole", "linear", "dense"),
        *_fields(_Runs, "chains", "singles", "whole"),
    )


class _Program(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_int64, "num_pairs", "num_routes", "src_lists"),
        *_fields(ctypes.c_void_p, "pairs", "routes"),
    )


class Bound(NamedTuple):
    """How many runs there are, their length (-1: they differ), and the runs and bytes of each route
    that has any.
    """

    runs: int
    length: int
    shares: tuple[tuple[Route, int, int], ...]


class Program:
    """The routes of a plan from one source rank, as `bind.c` takes them, and the pointers at which
    the buffers of each begin on both sides.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        bases: Sequence[tuple[Ints, Ints]],
        source: PoolLayout,
        dest: PoolLayout,
    ) -> None:
        self._routes, self._function = routes, _load()
        self._keep: list[Any] = []
        lists: tuple[dict[str, int], dict[str, int]] = ({}, {})
        numbers: dict[tuple[str, str, bool], int] = {}
        pairs: list[_Pair] = []
        made: list[_Route] = []
        for route, begins in zip(routes, bases):
            key = route.src_space.name, route.dst_space.name, route.packed
            if key not in numbers:
                numbers[key] = len(pairs)
                src = _space(route.src_space, source, lists[0])
                pairs.append(_Pair(src, _space(route.dst_space, dest, lists[1]), route.packed))
            made.append(self._route(route, begins, numbers[key]))
        self._lists = tuple(map(tuple, lists))
        self._spans = struct.Struct("Pqq" * sum(map(len, lists)))
        arrays = (_Pair * len(pairs))(*pairs), (_Route * len(made))(*made)
        self._keep += arrays
        sizes = len(pairs), len(made), len(lists[0])
        self._program = _Program(*sizes, *[ctypes.addressof(array) for array in arrays])
        self._at = ctypes.addressof(self._program)
        self._facts = ctypes.c_int64 * (1 + 2 * len(made))

    def bind(
        self,
        source_address: RequestAddress,
        dest_address: RequestAddress,
        tokens: range,
        layers: range | None,
        count: str,
        columns: Columns,
    ) -> Bound | None:
        """Writes the runs to `columns`. None where only the plain path knows them, or what is
        wrong.
        """
        spans: list[int] = []
        for names, held in zip(self._lists, (source_address.spans, dest_address.spans)):
            for name in names:
                span = held.get(name)
                if span is None:
                    return None
                spans += span.ids.__array_interface__["data"][0], span.ids.size, span.first_item
        of = (-1, -1) if layers is None else (layers.start, layers.stop)
        held_tokens = source_address.num_tokens, dest_address.num_tokens
        request = _REQUEST.pack(*held_tokens, tokens.start, tokens.stop, *of, COUNTS.index(count))
        facts = self._facts()
        given = self._at, request, self._spans.pack(*spans)
        runs: int = self._function(*given, columns.pointer, columns.capacity, facts)
        if runs > columns.capacity:
            columns.take(runs)
            runs = self._function(*given, columns.pointer, columns.capacity, facts)
        if runs < 0:
            return None
        length, *each = facts
        found = zip(self._routes, each[::2], each[1::2])
        return Bound(runs, length, tuple(share for share in found if share[1]))

    def _runs(self, runs: EntryRuns | Runs | None) -> _Runs:
        if runs is None:
            return _Runs()
        columns = (
            runs.columns() if isinstance(runs, EntryRuns) else (runs.src, runs.dst, runs.nbytes)
        )
        return _Runs(*map(self._pointer, columns), *[None] * (5 - len(columns)), runs.size)

    def _pointer(self, column: Ints) -> int:
        kept = np.ascontiguousarray(column, dtype=np.int64)
        self._keep.append(kept)
        return kept.ctypes.data

    def _route(self, route: Route, bases: tuple[Ints, Ints], pair: int) -> _Route:
        arrays = *bases, route.layers
        return _Route(
            pair,
            *map(self._pointer, arrays),
            len(route.src_buffers),
            route.src_stride,
            route.dst_stride,
            route.grows,
            route.whole is not None,
            route.linear,
            route.dense,
            self._runs(route.chains),
            self._runs(route.singles),
            self._runs(route.whole),
        )


def _space(space: Space, layout: PoolLayout, lists: dict[str, int]) -> _Space:
    held = space.held
    return _Space(
        KINDS.index(space.kind),
        lists.setdefault(space.id_list, len(lists)),
        space.entries_per_item,
        space.tokens_per_entry,
        space.steps,
        -1 if space.window is None else space.window,
        space.window_step,
        space.wraps,
        space.reserved,
        layout.items_by_space[space.name],
        *(held.size, held.rank, held.ranks),
    )


def availability() -> str | None:
    """None if plans that are made now are bound outside Python, else the reason why not."""
    if (problem := _native.availability()) is not None:
        return problem
    return None if _load() else "was not compiled, or is of another release. Install kvpool again."


@lru_cache(maxsize=1)
def _load() -> Any:
    """The compiled function, which keeps the GIL; None where it is not there, or of another
    release.
    """
    for path in sorted(Path(__file__).parent.glob("bind*.so")):
        try:
            library = ctypes.PyDLL(str(path))
            if library.kvpool_bind_abi() != ABI:
                return None
            function = library.kvpool_bind
        except (OSError, AttributeError):
            return None
        pointer = ctypes.c_void_p
        function.restype = ctypes.c_int64
        function.argtypes = (
            *(pointer, ctypes.c_char_p, ctypes.c_char_p, pointer, ctypes.c_int64, pointer),
        )
        return function
    return None
