"""Stores rows that have arrived in another format, by the operations of the device whose memory
they are for. Imports torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from disagg.digest.arrived import ArrivedDigests
from disagg.digest.cell_hash import read_memory
from disagg.digest.digest import Piece
from disagg.plan.bind import CopyBatch, Count
from disagg.plan.cast import Conversion
from disagg.plan.pieces import CastPiece, Placed, piece_address, pieces, placed, to_offsets
from disagg.plan.planner import Cast
from disagg.plan.runs import Box
from disagg.runtime.staging import ReadPart
from kvpool.device import Event, get_device
from kvpool.device.torch_ops import ReadRow, WriteRow
from kvpool.layout import Buffer, PoolLayout, Region, RequestAddress
from kvpool.layout.grid import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
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


class Converter:
    """Converts what arrives for a destination."""

    def __init__(self, cast: Cast, dest: PoolLayout) -> None:
        self._arrival, self._plan = cast
        self._dest, self._memory = dest, dest.buffers[0].memory
        self._device = get_device(self._memory)

    def parts(self, wanted: Wanted, most: int) -> Iterator[ReadPart]:
        """What is to be read, each part into a buffer of `most` bytes from which it is stored.
        Raises as TransferPlan.bind, and as `pieces`.
        """
        total, count = wanted.dest_address.num_tokens, wanted.count
        for owner, layers in self._layers(wanted):
            for piece in pieces(self._arrival, owner, layers, wanted.tokens, total, most):
                batch = self._plan.bind(
                    wanted.source,
                    wanted.source_address,
                    piece_address(piece, total),
                    tokens=piece.tokens,
                    layers=piece.layers,
                    owner=owner,
                    count=count,
                    checked=True,
                )
                if batch.runs:
                    rows = placed(
                        self._arrival, self._plan, wanted.source, piece, total, wanted.count
                    )
                    offsets = to_offsets(self._arrival, piece, batch.dst)
                    store = partial(self.store, piece, rows, wanted)
                    yield ReadPart(CopyBatch(batch.src, offsets, batch.nbytes), store=store)

    def store(
        self, piece: CastPiece, rows: Sequence[Placed], wanted: Wanted, pointer: int
    ) -> Event | None:
        """Stores rows of a piece that lies at `pointer`, and digests them first if that is wanted.
        Returns the event after which they are stored.
        """
        address = wanted.dest_address
        if wanted.arrived is not None:
            self._digest(piece, rows, wanted.arrived, pointer, address.num_tokens)
        for part in rows:
            items, steps = part.space.place(part.entries)
            first = 0 if part.space.per_request else part.first
            arrived_at = torch.from_numpy((items - first) * part.space.steps + steps)
            for key in part.keys:
                conversion = self._arrival.conversions.get(key)
                if conversion is None:  # scales, which go with their values
                    continue
                own = self._dest.space_of(conversion.dest.region)
                span = address.spans[own.id_list]
                ids = span.ids[items if own.per_request else items - span.first_item]
                stored_at = torch.from_numpy(ids * own.steps + steps)
                values = self._values(conversion, part.box, piece, pointer, arrived_at)
                self._device.store_rows([self._row(conversion, part.box, values)], stored_at)
        return self._device.record()

    def _layers(self, wanted: Wanted) -> Iterator[tuple[str, range]]:
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

    def _values(
        self,
        conversion: Conversion,
        box: Box,
        piece: CastPiece,
        pointer: int,
        locations: torch.Tensor,
    ) -> torch.Tensor:
        """Rows as they have arrived `[N, ..., D]`: those with scales as float32."""
        region, scale = conversion.arrival.region, conversion.arrival.scale
        scales = None if scale is None else self._arrived(scale, piece, pointer, box)
        row = ReadRow(self._arrived(region, piece, pointer, box), scales, torch.float32)
        (values,) = self._device.load_rows([row], locations)
        return values

    def _row(self, conversion: Conversion, box: Box, values: torch.Tensor) -> WriteRow:
        region, scale = conversion.dest.region, conversion.dest.scale
        view = view_of(region, self._dest.buffer_of(region), box, conversion.axis)
        if scale is None:
            return WriteRow(view, values.to(view.dtype))
        return WriteRow(view, values, view_of(scale, self._dest.buffer_of(scale), box))

    def _arrived(self, region: Region, piece: CastPiece, pointer: int, box: Box) -> torch.Tensor:
        buffer = self._arrival.layout.buffer_of(region)
        return view_of(region, self._here(buffer, piece, pointer), box)

    def _here(self, buffer: Buffer, piece: CastPiece, pointer: int) -> Buffer:
        """A buffer of the arrival, where it lies in a piece."""
        base, items = pointer + piece.offsets[buffer.name], len(piece.items[buffer.space])
        return replace(buffer, base=base, items=items, memory=self._memory)

    def _digest(
        self,
        piece: CastPiece,
        rows: Sequence[Placed],
        arrived: ArrivedDigests,
        pointer: int,
        total: int,
    ) -> None:
        def read(buffer: Buffer, offsets: Ints, width: int) -> npt.NDArray[np.void]:
            return read_memory(self._here(buffer, piece, pointer), offsets, width)

        parts = [Piece(key, row.box, row.needed, row.held) for row in rows for key in row.keys]
        arrived.take(self._arrival.layout, piece_address(piece, total), parts, read)


def view_of(region: Region, buffer: Buffer, box: Box, axis: str = "") -> torch.Tensor:
    """Rows `[item, entry, axes..., element]` of a region, of steps `box` of its axes; elements lie
    along `axis`, or in its cells.
    """
    kind = getattr(torch, region.dtype)
    size, entry, along = kind.itemsize, region.axis("entry"), region.axis(axis)
    steps = {name: range(low, high) for name, low, high in box}
    inner = [part for part in region.inner_axes if part.name != axis]
    offset = region.offset
    offset += sum((steps[part.name].start - part.start) * part.stride for part in inner)
    sizes = [buffer.items, entry.size if entry else 1, *(len(steps[part.name]) for part in inner)]
    strides = [buffer.item_stride, entry.stride if entry else buffer.item_stride]
    strides += [part.stride for part in inner]
    sizes.append(along.size if along else region.width // size)
    strides.append(along.stride if along else size)
    if any(stride % size for stride in strides) or (buffer.base + offset) % size:
        raise ValueError(f"{region}: its rows do not lie at multiples of {size} bytes.")
    flat, lead = memory_at(buffer.base, buffer.end - buffer.base), offset % size
    typed = flat[lead : lead + (flat.numel() - lead) // size * size].view(kind)
    return typed.as_strided(sizes, [stride // size for stride in strides], offset // size)


def memory_at(base: int, nbytes: int) -> torch.Tensor:
    """Host memory as bytes."""
    array: Any = (ctypes.c_ubyte * nbytes).from_address(base)
    return torch.from_numpy(np.frombuffer(array, dtype=np.uint8))
