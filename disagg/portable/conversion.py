"""Rows that are converted: what of them is read at once, into a buffer, and how it is stored from
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
from disagg.plan.cast.arrival import Conversion
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
from kvpool.device.rows_at import ScaledRowsAt, rows_at
from kvpool.layout import Buffer, PoolLayout, Region, RequestAddress
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

        address = wanted.dest_address
        if wanted.arrived is not None:
            self._digest(arrived, wanted.arrived, pointer)
        for part in arrived.rows:
            items, steps = part.space.place(part.entries)
            first = 0 if part.space.per_request else part.first
            read = (items - first) * part.space.steps + steps
            # scales go with their values
            conversions = [c for key in part.keys if (c := self._arrival.conversions.get(key))]
            if not conversions:
                continue
            own = self._dest.space_of(conversions[0].dest.region)
            span = address.spans[own.id_list]
            ids = span.ids[items if own.per_request else items - span.first_item]
            pairs = [
                (self._source(c, part.box, arrived.piece, pointer), self._stored(c, part.box))
                for c in conversions
            ]
            convert_rows(self._device, pairs, read, ids * own.steps + steps)
        return self._device.record()

    def _source(
        self, conversion: Conversion, box: Box, piece: CastPiece, pointer: int
    ) -> ScaledRowsAt:
        """Rows as they have arrived."""
        region, scale = conversion.arrival.region, conversion.arrival.scale
        steps = steps_of(box)
        rows = rows_at(region, self._here(region, piece, pointer), steps)
        if scale is None:
            return ScaledRowsAt(rows)
        return ScaledRowsAt(rows, rows_at(scale, self._here(scale, piece, pointer), steps))

    def _stored(self, conversion: Conversion, box: Box) -> ScaledRowsAt:
        """Rows as the destination has them."""
        region, scale = conversion.dest.region, conversion.dest.scale
        steps = steps_of(box)
        rows = rows_at(region, self._dest.buffer_of(region), steps, conversion.axis)
        if scale is None:
            return ScaledRowsAt(rows)
        return ScaledRowsAt(rows, rows_at(scale, self._dest.buffer_of(scale), steps))

    def _here(self, region: Region, piece: CastPiece, pointer: int) -> Buffer:
        """The buffer of the arrival that a region is in, where it lies in a piece."""
        return self._moved(self._arrival.layout.buffer_of(region), piece, pointer)

    def _moved(self, buffer: Buffer, piece: CastPiece, pointer: int) -> Buffer:
        base, items = pointer + piece.offsets[buffer.name], len(piece.items[buffer.space])
        return replace(buffer, base=base, items=items, memory=self._memory)

    def _layers(self, wanted: WantedRows) -> Iterator[tuple[str, range]]:
        """The layers of each owner of which something is converted."""
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
        digests.take(self._arrival.layout, piece_address(piece), parts, read)


class _Arrived(NamedTuple):
    """A piece, and what of it a source rank has sent."""

    piece: CastPiece
    rows: list[Placed]


def steps_of(box: Box) -> dict[str, range]:
    """Steps by axis."""
    return {name: range(low, high) for name, low, high in box}
