"""`save`: from a pool to a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from disagg.digest.digest import digests
from disagg.plan import plan
from disagg.protocol.conventions import Convention, checked_conventions
from disagg.snapshot.copies import Staging, batches, windows
from disagg.snapshot.files import replacing, write
from disagg.snapshot.header import MAX_TOKENS, Header, checked_request
from disagg.snapshot.portable import block_table, live_pieces, portable
from kvpool.layout import Key, PoolLayout, RequestAddress
from kvpool.layout.pin import pinned_by_call


def save(
    path: str | os.PathLike[str],
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
    count = address.num_tokens if tokens is None else tokens
    if not 1 <= count <= min(address.num_tokens, MAX_TOKENS):
        raise ValueError(
            f"tokens: 1 to {min(address.num_tokens, MAX_TOKENS)}, which the block table has, got "
            f"{count}."
        )
    checked = checked_conventions(conventions)
    file_layout = portable(layout, count)
    pieces = list(live_pieces(file_layout, count))
    empty: dict[Key, int] = {piece.key: 0 for piece in pieces}
    header = Header(count, file_layout, checked_request(request), checked, empty)
    start = len(header.encode())
    transfer, file_address = plan([layout], file_layout), block_table(file_layout, count)
    staging = Staging(layout)
    what = f"save to {path}"
    with pinned_by_call(what, address, layout, "offered"), replacing(path) as file:
        os.ftruncate(file, start + header.data_bytes)
        for batch in batches(transfer, 0, address, file_address, range(count)):
            for offsets, pointers, nbytes in windows(batch.dst, batch.src, batch.nbytes, max_gap=0):
                size = int(offsets[-1] + nbytes[-1] - offsets[0])
                staging.gather(pointers, offsets - offsets[0], nbytes, size)
                write(file, start + int(offsets[0]), staging.bytes[:size].data)
        # of the pool, not of the file: what a copy got wrong is found at load
        prefix = RequestAddress(count, address.spans)
        parts = [part for part in digests(layout, prefix, pieces) if part is not None]
        values = [value for part in parts for value in part.tolist()]
        hashes = dict(zip(empty, values))
        write(file, 0, replace(header, digests=hashes).encode())
