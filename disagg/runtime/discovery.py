"""Where prefills are: a directory that all hosts see, one small file a rank, no server.

    publish("/shared/run7", "prefill0", rank=1, ranks=2, address=endpoint.address)
    decode.connect(discover("/shared/run7", "prefill0", timeout=60))

A rank that restarts publishes itself again. Files are replaced whole, so none is ever half there.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

MAX_RANKS = 1 << 16
PAUSE_SECONDS = 0.05

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_WILDCARDS = ("tcp://0.0.0.0:", "tcp://*:", "tcp://[::]:")

Count = Annotated[int, Meta(ge=0, le=MAX_RANKS)]


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank's file says, as JSON."""

    prefill: str
    rank: Count
    ranks: Count
    address: Annotated[str, Meta(max_length=256)]


def publish(
    directory: str | os.PathLike[str], prefill: str, *, rank: int, ranks: int, address: str
) -> None:
    """Says where rank number `rank` of `ranks` of a prefill is. Raises ValueError."""
    if not _NAME.fullmatch(prefill):
        raise ValueError(f"prefill {prefill!r}: a name of letters, digits, - and _, at most 64.")
    if not 0 <= rank < ranks <= MAX_RANKS:
        raise ValueError(f"rank {rank} of {ranks}: from 0 to {ranks - 1}.")
    if address.startswith(_WILDCARDS):
        raise ValueError(
            f"address {address}: nobody can connect to that. Bind to an address of this host."
        )
    place = Path(directory)
    place.mkdir(parents=True, exist_ok=True)
    new = place / f".{prefill}.{rank}.{os.getpid()}"
    new.write_bytes(msgspec.json.encode(Place(prefill, rank, ranks, address)))
    new.replace(place / f"{prefill}.{rank}.json")


def discover(directory: str | os.PathLike[str], prefill: str, timeout: float = 0.0) -> list[str]:
    """The addresses of all ranks of a prefill, in order; waits for them for `timeout` seconds.

    Raises TimeoutError that names the ranks that are missing, ValueError for a file that is none.
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
    """Names of the prefills of which a rank was published."""
    return sorted({file.name.rsplit(".", 2)[0] for file in Path(directory).glob("[!.]*.*.json")})


def _places(directory: Path, prefill: str) -> dict[int, Place]:
    places = {}
    for file in directory.glob(f"{prefill}.*.json"):
        try:
            place = msgspec.json.decode(file.read_bytes(), type=Place)
        except (msgspec.MsgspecError, OSError) as error:
            raise ValueError(f"{file}: {error}. Remove it, and publish the rank again.") from None
        places[place.rank] = place
    counts = {place.ranks for place in places.values()}
    if len(counts) > 1:
        raise ValueError(
            f"{directory}: ranks of prefill {prefill!r} disagree on how many they are "
            f"({', '.join(map(str, sorted(counts)))}). Remove the files of its earlier life."
        )
    return places
