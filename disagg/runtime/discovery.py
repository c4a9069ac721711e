"""Endpoint addresses of prefills: a directory that all hosts see, one small file a rank, no server.

    publish("/shared/run7", "prefill0", rank=1, ranks=2, address=endpoint.address)
    decode.connect(discover("/shared/run7", "prefill0", timeout=60))

A rank that restarts publishes itself again. Files are replaced as a whole, so a reader sees the old
one or the new one. The directory and its files must be this user's or root's, and nobody else's to
write: who writes there says whom a decode connects to.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from disagg.host.trusted_files import open_folder, read_file, write_file

MAX_RANKS = 1 << 16
PAUSE_SECONDS = 0.05

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_WILDCARDS = ("tcp://0.0.0.0:", "tcp://*:", "tcp://[::]:")

RankCount = Annotated[int, Meta(ge=0, le=MAX_RANKS)]


class RankFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a rank's file, as JSON."""

    prefill: str
    rank: RankCount
    ranks: RankCount
    address: Annotated[str, Meta(max_length=256)]


def publish(
    directory: str | os.PathLike[str], prefill: str, *, rank: int, ranks: int, address: str
) -> None:
    """Publishes the endpoint address of rank `rank` of `ranks` of a prefill, in a directory that is
    made if it is not there. Raises ValueError, also for a directory that others may write to.
    """
    if not _NAME.fullmatch(prefill):
        raise ValueError(f"prefill {prefill!r}: a name of letters, digits, - and _, at most 64.")
    if not 0 <= rank < ranks <= MAX_RANKS:
        raise ValueError(f"rank {rank} of {ranks}: from 0 to {ranks - 1}.")
    if address.startswith(_WILDCARDS):
        raise ValueError(
            f"address {address}: no other host can dial that. Bind to an address of this host."
        )
    place = Path(directory)
    with suppress(FileExistsError):
        place.mkdir(0o700, parents=True)
    folder = open_folder(place)
    new = f".{prefill}.{rank}.{secrets.token_hex(8)}"
    try:
        data = msgspec.json.encode(RankFile(prefill, rank, ranks, address))
        write_file(folder, new, data, 0o644)
        os.replace(new, f"{prefill}.{rank}.json", src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.close(folder)


def discover(directory: str | os.PathLike[str], prefill: str, timeout: float = 0.0) -> list[str]:
    """The endpoint addresses of all ranks of a prefill, in order; waits for them `timeout` seconds.

    Raises TimeoutError, which names the missing ranks, and ValueError for a malformed file, and for
    a directory or file that others may have written.
    """
    end = time.monotonic() + timeout
    while True:
        places = _places(Path(directory), prefill)
        ranks = max((place.ranks for place in places.values()), default=1)
        missing = [rank for rank in range(ranks) if rank not in places]
        if not missing:
            return [places[rank].address for rank in range(ranks)]
        if time.monotonic() >= end:
            raise TimeoutError(
                f"{directory}: rank {', '.join(map(str, missing))} of prefill {prefill!r} "
                f"is not there after {timeout:g} s."
            )
        time.sleep(PAUSE_SECONDS)


def prefills(directory: str | os.PathLike[str]) -> list[str]:
    """Names of the prefills that have published a rank."""
    return sorted({file.name.rsplit(".", 2)[0] for file in Path(directory).glob("[!.]*.*.json")})


def _places(directory: Path, prefill: str) -> dict[int, RankFile]:
    try:
        folder = open_folder(directory)
    except FileNotFoundError:
        return {}
    places = {}
    try:
        for name in os.listdir(folder):
            if re.fullmatch(rf"{re.escape(prefill)}\.[0-9]+\.json", name):
                file = directory / name
                try:
                    place = msgspec.json.decode(read_file(folder, file), type=RankFile)
                except FileNotFoundError:
                    continue  # withdrawn meanwhile
                except msgspec.MsgspecError as error:
                    raise ValueError(
                        f"{file}: {error}. Remove it, and publish the rank again."
                    ) from None
                places[place.rank] = place
    finally:
        os.close(folder)
    counts = {place.ranks for place in places.values()}
    if len(counts) > 1:
        raise ValueError(
            f"{directory}: ranks of prefill {prefill!r} give different numbers of ranks "
            f"({', '.join(map(str, sorted(counts)))}). Remove the files of the earlier run."
        )
    return places
