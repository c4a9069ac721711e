"""A request's state as a file: saved by one rank, loaded by ranks of any other geometry.

A file is one more source of memory. It has a layout, as a pool has, with offsets in the file for
pointers; plans move bytes to it and from it. `docs/snapshots.md` has the format.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from disagg.digest.digest import digests
from disagg.plan import CopyBatch, TransferPlan, plan
from disagg.plan.cast.scales import scale_problems
from disagg.portable.conversion import ConvertedPart, Converter, WantedRows
from disagg.portable.layout import block_table, live_pieces, portable
from disagg.portable.staging import Staging, windows
from disagg.protocol.messages import Convention, checked_conventions
from disagg.snapshot.files import SnapshotFile, replacing, write
from disagg.snapshot.header import MAX_TOKENS, Header, SnapshotRefused, checked_request
from kvpool.layout import Key, PoolLayout, RequestAddress
from kvpool.layout.request_address import pinned_by_call

__all__ = ["Header", "SnapshotRefused", "check", "inspect", "load", "save"]

STAGING_BYTES = 8 << 20
"""Size of the staging buffer, and so of a window."""
CHUNK_TOKENS = 2048
"""Tokens of one layer that are bound at once: bounds the memory for runs."""
MAX_GAP = 64 << 10
"""The longest gap between needed bytes that is read instead of skipped."""

Path = str | os.PathLike[str]


def save(
    path: Path,
    layout: PoolLayout,
    address: RequestAddress,
    *,
    tokens: int | None = None,
    request: str = "",
    conventions: Mapping[str, Convention] = MappingProxyType({}),
) -> None:
    """Writes the first `tokens` (default: all) tokens of a request to a file: what this rank, whose
    pool `layout` describes, holds of them.

    `request` names the request; the files of several ranks are loaded together only if they name
    the same one. `conventions` is what loaders are to agree with
    (`disagg.connectors.conventions`). The file is complete under its name or not there, on disk
    when the call returns, and readable by its owner only.

    Raises IncompleteTransfer where state of these tokens is gone (a slot or ring holds that of the
    last token only), RequestPinned while a room receives the request, DeviceUnavailable, OSError,
    and ValueError for arguments that cannot be; `path` is then what it was before.
    """
    most = min(address.num_tokens, MAX_TOKENS)
    count = address.num_tokens if tokens is None else tokens
    if not 1 <= count <= most:
        raise ValueError(f"tokens: 1 to {most}, which the block table has, got {count}.")
    checked = checked_conventions(conventions)
    file_layout = portable(layout, count)
    pieces = list(live_pieces(file_layout, count))
    empty: dict[Key, int] = {piece.key: 0 for piece in pieces}
    header = Header(
        tokens=count,
        layout=file_layout,
        request=checked_request(request),
        conventions=checked,
        digests=empty,
    )
    start = len(header.encode())
    transfer, file_table = plan([layout], file_layout), block_table(file_layout, count)
    staging = Staging(layout, STAGING_BYTES)
    with pinned_by_call(f"save to {path}", address, layout, "offered"), replacing(path) as file:
        os.ftruncate(file, start + header.data_bytes)
        for batch in batches(transfer, 0, address, file_table, range(count)):
            for offsets, pointers, nbytes in windows(
                batch.dst, batch.src, batch.nbytes, most=STAGING_BYTES
            ):
                size = int(offsets[-1] + nbytes[-1] - offsets[0])
                staging.gather(pointers, offsets - offsets[0], nbytes, size)
                write(file, start + int(offsets[0]), staging.bytes[:size].data)
        # of the pool, not of the file: what a copy got wrong is found at load
        prefix = RequestAddress(count, address.spans)
        values = np.concatenate([*digests(layout, prefix, pieces)]).tolist()
        write(file, 0, replace(header, digests=dict(zip(empty, values))).encode())


def inspect(path: Path) -> Header:
    """What a file holds, by its header. Raises SnapshotRefused and OSError."""
    with closing(SnapshotFile(path)) as file:
        return file.header


def check(path: Path) -> Header:
    """As `inspect`, and compares all data with the digests of what was saved."""
    with closing(SnapshotFile(path)) as file:
        file.check()
        return file.header


def load(
    paths: Path | Sequence[Path],
    layout: PoolLayout,
    address: RequestAddress,
    *,
    tokens: range | None = None,
    conventions: Mapping[str, Convention] = MappingProxyType({}),
    allow_missing: Collection[str] = (),
    cast: bool | Collection[str] = False,
) -> int:
    """Reads positions `tokens` (default: all) of a request from the files of its ranks, all that
    this rank needs together, into the pool that `layout` describes; returns how many these are.

    The block table may have fewer tokens than the files: then it is a prefix that is loaded.
    `tokens` begins after what is there already, and ends with the block table's last.
    `allow_missing` and `cast` are `plan`'s. Nothing is written before all files are checked.

    Raises SnapshotRefused for a file that is damaged, or of another model or request, or has too
    few tokens; IncompatibleLayouts where the files do not have all state (to its sentences,
    "prefill" is the files, "decode" this pool); IncompleteTransfer where they do not have the state
    at that prefix; RequestPinned and ValueError for a block table that may not be written to;
    DeviceUnavailable and OSError.
    """
    total = address.num_tokens
    wanted = range(total) if tokens is None else tokens
    if wanted.step != 1 or not 0 <= wanted.start <= wanted.stop == total:
        raise ValueError(
            f"tokens={tokens}: a range that ends with the block table's {total} tokens. State of "
            "a prefix is loaded into a block table of that prefix."
        )
    names = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not names:
        raise ValueError("load needs at least one file.")
    with ExitStack() as stack:
        files = [stack.enter_context(closing(SnapshotFile(path))) for path in names]
        _check_agree(files, layout, total, conventions)
        layouts = [file.header.layout for file in files]
        transfer = plan(layouts, layout, allow_missing=allow_missing, cast=cast)
        _check_scales(files, transfer, conventions)
        what = f"load of {files[0].path}"
        stack.enter_context(pinned_by_call(what, address, layout, "received", wanted.start))
        _copy_in(files, transfer, layout, address, wanted)
    return len(wanted)


def _copy_in(
    files: Sequence[SnapshotFile],
    transfer: TransferPlan,
    layout: PoolLayout,
    address: RequestAddress,
    wanted: range,
) -> None:
    """Copies positions `wanted` of a request from files; all are checked before."""
    staging = Staging(layout, STAGING_BYTES)
    arrival = staging if transfer.cast is None else Staging(layout, STAGING_BYTES)

    def moved(rank: int) -> Iterator[CopyBatch]:
        return batches(transfer, rank, files[rank].address, address, wanted)

    def converted(rank: int) -> Iterator[ConvertedPart]:
        if transfer.cast is not None:
            wanted_here = WantedRows(
                source=rank,
                source_address=files[rank].address,
                dest_address=address,
                tokens=wanted,
            )
            yield from Converter(transfer.cast, layout).parts(wanted_here, STAGING_BYTES)

    parts = [*transfer.parts, *(transfer.cast.plan.parts if transfer.cast else ())]
    for rank, file in enumerate(files):
        for _ in moved(rank):  # refuses what cannot be bound
            pass
        for _ in converted(rank):
            pass
        file.check({key for p in parts if p.source == rank for key in p.keys})
    for rank, file in enumerate(files):
        with file.copied():
            for batch in moved(rank):
                _read(file, batch, staging)
            for part in converted(rank):
                _read_converted(file, part, staging, arrival)
    for file in files:
        with file.copied():
            file.check_unchanged()


def _read(file: SnapshotFile, batch: CopyBatch, staging: Staging) -> None:
    for offsets, pointers, nbytes in windows(
        batch.src, batch.dst, batch.nbytes, most=STAGING_BYTES, max_gap=MAX_GAP
    ):
        first = int(offsets[0])
        size = int(offsets[-1] + nbytes[-1]) - first
        file.read(first, staging.bytes[:size])
        staging.scatter(offsets - first, pointers, nbytes, size)


def _read_converted(
    file: SnapshotFile, part: ConvertedPart, staging: Staging, arrival: Staging
) -> None:
    src, dst, nbytes = part.read
    _read(file, CopyBatch(src, dst + arrival.pointer, nbytes), staging)
    part.store(arrival.pointer).synchronize()


def _check_scales(
    files: Sequence[SnapshotFile], transfer: TransferPlan, conventions: Mapping[str, Convention]
) -> None:
    """Refuses to convert what is scaled by what no page has."""
    if transfer.cast is not None:
        source_conventions = [file.header.conventions for file in files]
        if problems := scale_problems(transfer.cast.arrival, source_conventions, conventions):
            raise SnapshotRefused(f"{files[0].path}: {' '.join(problems)}")


def _check_agree(
    files: Sequence[SnapshotFile],
    layout: PoolLayout,
    tokens: int,
    conventions: Mapping[str, Convention],
) -> None:
    """Refuses files of several requests, of another model, and of fewer tokens than are wanted."""
    first = files[0]
    if len(files) > 1 and not first.header.request:
        raise SnapshotRefused(
            f"{first.path}: it names no request, so other files may be of "
            "another. Save the files of several ranks with request=..."
        )
    agreed = {name: (value, "here") for name, value in checked_conventions(conventions).items()}
    for file in files:
        header = file.header
        for what, value, file_value in (
            ("request", first.header.request, header.request),
            ("tokens", first.header.tokens, header.tokens),
            ("model", first.header.layout.model, header.layout.model),
        ):
            if value != file_value:
                raise SnapshotRefused(
                    f"{file.path}: {what} {file_value!r}, in {first.path} {value!r}. Load the "
                    "files of one request, saved at one time."
                )
        for name, setting in header.conventions.items():
            wanted, source = agreed.setdefault(name, (setting, f"in {file.path}"))
            if wanted != setting:
                raise SnapshotRefused(
                    f"{file.path}: {name} {setting!r}, {source} {wanted!r}. Load it into the same "
                    "model with the same settings."
                )
    count, model = first.header.tokens, first.header.layout.model
    if count < tokens:
        raise SnapshotRefused(
            f"{first.path}: it has {count} tokens, the block table {tokens}. Load at most {count}."
        )
    if layout.model and model not in ("", layout.model):
        raise SnapshotRefused(f"{first.path}: state of model {model!r}, this is {layout.model!r}.")


def batches(
    transfer: TransferPlan,
    source: int,
    source_address: RequestAddress,
    dest_address: RequestAddress,
    tokens: range,
) -> Iterator[CopyBatch]:
    """What `transfer.bind` moves of `tokens`, layer by layer and chunk by chunk."""
    layers = sorted({key[:2] for p in transfer.parts if p.source == source for key in p.keys})
    starts = range(tokens.start, tokens.stop, CHUNK_TOKENS) or [tokens.start]
    for owner, layer in layers:
        for start in starts:
            yield transfer.bind(
                source,
                source_address,
                dest_address,
                tokens=range(start, min(start + CHUNK_TOKENS, tokens.stop)),
                layers=range(layer, layer + 1),
                owner=owner,
            )
