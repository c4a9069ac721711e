"""Rows that are converted: which part is read at once, into a buffer, and how it is stored from
there, by the operations of the device whose memory it is for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from disagg.digest.arrived import ArrivedDigests
from disagg.digest.cell_hash import read_memory
from disagg.digest.digest import Piece
from disagg.plan.bind import CopyBatch, Count
from disagg.plan.cast.arrival import ARRIVAL_BITS
from disagg.plan.cast.pieces import (
    CastPiece,
    Extent,
    Placed,
    piece_address,
    pieces,
    placed,
    to_offsets,
)
from disagg.plan.planner import Cast
from disagg.plan.runs import Box
from kvpool.device import get_device
from kvpool.device.rows_at import RowsAt, ScaledRowsAt, rows_at
from kvpool.layout import Buffer, Key, PoolLayout, RequestAddress
from kvpool.layout.grid import Ints

if TYPE_CHECKING:
    from kvpool.device import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedRows:
    """What is wanted of one source rank: positions `tokens` of a request, and with `layers` of
    these of `owner` only. `arrived` takes digests of what arrives.
    """

    source: int
    source_address: RequestAddress
    dest_address: RequestAddress
    tokens: range
    layers: range | None = None
    owner: str = ""
    count: Count = Count.KNOWN
    arrived: ArrivedDigests | None = None


class ConvertedPart(NamedTuple):
    """What is read at once: destinations of `read` are offsets in a buffer, from whose pointer
    `store` stores it. That returns the event after which the buffer may be used again.
    """

    read: CopyBatch
    store: Callable[[int], Event]


class Converter:
    """Converts what arrives for a destination. Raises DeviceUnavailable."""

    def __init__(self, cast: Cast, dest: PoolLayout) -> None:
        self._cast, self._arrival = cast, cast.arrival
        self._dest, self._memory = dest, dest.buffers[0].memory
        self._device = get_device(self._memory)
        self._pairs: dict[tuple[Key, Box], tuple[ScaledRowsAt, ScaledRowsAt]] = {}

    def parts(self, wanted: WantedRows, most: int) -> Iterator[ConvertedPart]:
        """What is to be read, each part into a buffer of `most` bytes. Raises as TransferPlan.bind,
        and as `pieces`.
        """
        total, count = wanted.dest_address.num_tokens, wanted.count
        for owner, layers in self._layers(wanted):
            extent = Extent(owner, layers, wanted.tokens, total)
            for piece in pieces(self._cast.arrival, extent, most):
                batch = self._cast.plan.bind(
                    wanted.source,
                    wanted.source_address,
                    piece_address(piece),
                    tokens=piece.extent.tokens,
                    layers=piece.extent.layers,
                    owner=owner,
                    count=count,
                    checked=True,
                )
                if batch.runs:
                    rows = placed(self._cast, wanted.source, piece, count)
                    offsets = to_offsets(self._cast.arrival, piece, batch.dst)
                    part = CopyBatch(batch.src, offsets, batch.nbytes)
                    yield ConvertedPart(part, partial(self._store, _Arrived(piece, rows), wanted))

    def _store(self, arrived: _Arrived, wanted: WantedRows, pointer: int) -> Event:
        """Stores what lies at `pointer`, and digests it first if that is wanted."""
        from kvpool.device.conversion import convert_rows  # imports torch

        table = wanted.dest_address
        if wanted.arrived is not None:
            self._digest(arrived, wanted.arrived, pointer)
        for part in arrived.rows:
            items, steps = part.space.place(part.entries)
            first = 0 if part.space.per_request else part.first
            read = (items - first) * part.space.steps + steps
            # scales go with their values
            keys = [key for key in part.keys if key in self._arrival.conversions]
            if not keys:
                continue
            own = self._dest.space_of(self._arrival.conversions[keys[0]].dest.region)
            span = table.spans[own.id_list]
            ids = span.ids[items if own.per_request else items - span.first_item]
            pairs = []
            for key in keys:
                (rows, scales), dest = self._pair(key, part.box)
                source = ScaledRowsAt(
                    self._here(rows, arrived.piece, pointer),
                    self._here(scales, arrived.piece, pointer) if scales else None,
                )
                pairs.append((source, dest))
            convert_rows(self._device, pairs, read, ids * own.steps + steps)
        return self._device.record()

    def _pair(self, key: Key, box: Box) -> tuple[ScaledRowsAt, ScaledRowsAt]:
        """Rows in the arrival, and as the destination has them."""
        if (key, box) not in self._pairs:
            conversion, steps = self._arrival.conversions[key], {n: range(a, b) for n, a, b in box}
            sides: list[ScaledRowsAt] = []
            for layout, (values, scale, _), axis in (
                (self._arrival.layout, conversion.arrival, ""),
                (self._dest, conversion.dest, conversion.axis),
            ):
                rows = rows_at(values, layout.buffer_of(values), steps, axis)
                scales = rows_at(scale, layout.buffer_of(scale), steps) if scale else None
                sides.append(ScaledRowsAt(rows, scales))
            self._pairs[key, box] = sides[0], sides[1]
        return self._pairs[key, box]

    def _here(self, rows: RowsAt, piece: CastPiece, pointer: int) -> RowsAt:
        """Rows of the arrival, where they lie in a piece."""
        buffer = self._arrival.layout.buffers[(rows.base >> ARRIVAL_BITS) - 1]
        base = rows.base - buffer.base + pointer + piece.offsets[buffer.name]
        return rows._replace(base=base, sizes=(len(piece.items[buffer.space]), *rows.sizes[1:]))

    def _moved(self, buffer: Buffer, piece: CastPiece, pointer: int) -> Buffer:
        base, items = pointer + piece.offsets[buffer.name], len(piece.items[buffer.space])
        return replace(buffer, base=base, items=items, memory=self._memory)

    def _layers(self, wanted: WantedRows) -> Iterator[tuple[str, range]]:
        """The layers of each owner that have converted regions."""
        layers: dict[str, list[int]] = {}
        for owner, layer, _ in self._arrival.conversions:
            layers.setdefault(owner, []).append(layer)
        for owner, numbers in layers.items():
            low, high = min(numbers), max(numbers) + 1
            if wanted.layers is not None:
                if owner != wanted.owner:
                    continue
                low, high = max(low, wanted.layers.start), min(high, wanted.layers.stop)
            if low < high:
                yield owner, range(low, high)

    def _digest(self, arrived: _Arrived, digests: ArrivedDigests, pointer: int) -> None:
        piece, rows = arrived

        def read(buffer: Buffer, offsets: Ints, width: int) -> npt.NDArray[np.void]:
            return read_memory(self._moved(buffer, piece, pointer), offsets, width)

        parts = [Piece(key, row.box, row.needed, row.held) for row in rows for key in row.keys]
        digests.digest_arrived(self._arrival.layout, piece_address(piece), parts, read)


class _Arrived(NamedTuple):
    """A piece, and what of it a source rank has sent."""

    piece: CastPiece
    rows: list[Placed]
