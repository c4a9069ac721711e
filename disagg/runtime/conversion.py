"""Stores rows that have arrived in another format, by the operations of the device whose memory
they are for. Imports torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from disagg.digest.arrived import ArrivedDigests
from disagg.digest.cell_hash import read_memory
from disagg.digest.digest import Piece
from disagg.plan.bind import CopyBatch
from disagg.plan.cast import Arrival, Conversion
from disagg.plan.pieces import CastPiece, Placed, piece_address, pieces, placed, to_offsets
from disagg.plan.planner import Cast
from disagg.plan.runs import Box
from disagg.protocol.peers.link import Read
from disagg.runtime.staging import ReadPart
from kvpool.device import Event, get_device
from kvpool.device.torch_ops import ReadRow, WriteRow
from kvpool.layout import Buffer, PoolLayout, Region
from kvpool.layout.grid import Ints


def converted_parts(read: Read, layout: PoolLayout, most: int) -> Iterator[ReadPart]:
    """The parts of a read whose rows are stored in another format: each takes one staging buffer,
    of `most` bytes. Raises as TransferPlan.bind, and as `pieces`.
    """
    assert read.plan.cast is not None
    arrival, planned = read.plan.cast
    source, total = read.rank.source, read.dest_address.num_tokens
    converter = Converter(read.plan.cast, layout)
    for owner, layers in _layers(read, arrival):
        for piece in pieces(arrival, owner, layers, read.tokens, total, most):
            batch = planned.bind(
                source,
                read.source_address,
                piece_address(piece, total),
                tokens=piece.tokens,
                layers=piece.layers,
                owner=owner,
                count=read.count,
                checked=True,
            )
            if batch.runs:
                offsets = to_offsets(arrival, piece, batch.dst)
                layout_there = planned.sources[source]
                rows = placed(
                    arrival, planned.parts, source, layout_there, piece, total, read.count
                )
                store = partial(converter.store, piece, rows, read)
                yield ReadPart(CopyBatch(batch.src, offsets, batch.nbytes), store=store)


def _layers(read: Read, arrival: Arrival) -> Iterator[tuple[str, range]]:
    """The layers of each owner that a read is about."""
    layers: dict[str, list[int]] = {}
    for owner, layer, _ in arrival.conversions:
        layers.setdefault(owner, []).append(layer)
    for owner, numbers in layers.items():
        low, high = min(numbers), max(numbers) + 1
        if read.layers is not None:
            if read.layers.owner != owner:
                continue
            some = read.layers.layers
            low, high = max(low, some.start), min(high, some.stop)
        if low < high:
            yield owner, range(low, high)


class Converter:
    """Converts what arrives for one destination."""

    def __init__(self, cast: Cast, dest: PoolLayout) -> None:
        self._arrival, self._dest = cast.arrival, dest
        self._device = get_device(dest.buffers[0].memory)

    def store(
        self, piece: CastPiece, rows: Sequence[Placed], read: Read, pointer: int
    ) -> Event | None:
        """Stores rows of a piece of a read that lies at `pointer`, and digests them if the read
        says so. Returns what has happened once they are stored.
        """
        if read.arrived is not None:
            self._digest(piece, rows, read.arrived, pointer, read.dest_address.num_tokens)
        address = read.dest_address
        for part in rows:
            space = part.space
            items, steps = space.place(part.entries)
            first = 0 if space.per_request else part.first
            local = torch.from_numpy((items - first) * space.steps + steps)
            for key in part.keys:
                conversion = self._arrival.conversions.get(key)
                if conversion is None:  # scales, which go with their values
                    continue
                own = self._dest.space_of(conversion.dest.region)
                span = address.spans[own.id_list]
                index = items if own.per_request else items - span.first_item
                there = torch.from_numpy(span.ids[index] * own.steps + steps)
                self._store(conversion, part.box, piece, pointer, local, there)
        return self._device.record()

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

        pieces = [
            Piece(key, part.box, part.needed, part.held) for part in rows for key in part.keys
        ]
        arrived.take(self._arrival.layout, piece_address(piece, total), pieces, read)

    def _store(
        self,
        conversion: Conversion,
        box: Box,
        piece: CastPiece,
        pointer: int,
        local: torch.Tensor,
        there: torch.Tensor,
    ) -> None:
        arrival, dest = conversion.arrival, conversion.dest
        device = self._device
        read = ReadRow(
            self._arrived(arrival.region, piece, pointer, box),
            None if arrival.scale is None else self._arrived(arrival.scale, piece, pointer, box),
            torch.float32,
        )
        (values,) = device.load_rows([read], local)
        view = view_of(dest.region, self._dest.buffer_of(dest.region), box, conversion.axis)
        scales = None
        if dest.scale is None:
            values = values.to(view.dtype)
        else:
            scales = view_of(dest.scale, self._dest.buffer_of(dest.scale), box, "")
        device.store_rows([WriteRow(view, values, scales)], there)

    def _arrived(self, region: Region, piece: CastPiece, pointer: int, box: Box) -> torch.Tensor:
        buffer = self._arrival.layout.buffer_of(region)
        return view_of(region, self._here(buffer, piece, pointer), box, "")

    def _here(self, buffer: Buffer, piece: CastPiece, pointer: int) -> Buffer:
        """A buffer of the arrival, where it lies in a piece."""
        base, items = pointer + piece.offsets[buffer.name], len(piece.items[buffer.space])
        return replace(buffer, base=base, items=items, memory=self._dest.buffers[0].memory)


def view_of(region: Region, buffer: Buffer, box: Box, axis: str) -> torch.Tensor:
    """Rows `[item, entry, axes..., element]` of a region, of steps `box` of its axes; elements lie
    along `axis`, or in its cells.
    """
    kind = getattr(torch, region.dtype)
    size = kind.itemsize
    sizes, strides, offset = [buffer.items], [buffer.item_stride], region.offset
    entry = region.axis("entry")
    sizes.append(entry.size if entry else 1)
    strides.append(entry.stride if entry else buffer.item_stride)
    steps = {name: (low, high) for name, low, high in box}
    for part in region.inner_axes:
        if part.name != axis:
            low, high = steps[part.name]
            sizes.append(high - low)
            strides.append(part.stride)
            offset += (low - part.start) * part.stride
    along = region.axis(axis)
    sizes.append(along.size if along else region.width // size)
    strides.append(along.stride if along else size)
    flat = memory_at(buffer.base, buffer.end - buffer.base)
    if any(stride % size for stride in strides) or (buffer.base + offset) % size:
        raise ValueError(f"{region}: its rows are not aligned to {region.dtype}.")
    lead = offset % size
    typed = flat[lead : lead + (flat.numel() - lead) // size * size].view(kind)
    return typed.as_strided(sizes, [stride // size for stride in strides], offset // size)


def memory_at(base: int, nbytes: int) -> torch.Tensor:
    """Host memory as bytes."""
    array: Any = (ctypes.c_ubyte * nbytes).from_address(base)
    return torch.from_numpy(np.frombuffer(array, dtype=np.uint8))
