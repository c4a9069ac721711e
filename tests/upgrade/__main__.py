"""`python -m tests.upgrade --old PATH`: a fleet of the kvpool at PATH, a checkout of an earlier
commit, is replaced by today's, and back; then by other weights. Prints what became of all requests.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from disagg.protocol.versions import PROTOCOL
from tests.upgrade.fleet import PLACES, Fleet
from tests.upgrade.servers import Build


def protocol_of(tree: Path) -> int:
    """The number of an earlier commit, wherever it had it."""
    for file in ("versions.py", "messages.py"):
        path = tree / "disagg/protocol" / file
        if path.exists() and (number := re.search(r"^PROTOCOL = (\d+)", path.read_text(), re.M)):
            return int(number[1])
    raise SystemExit(f"{tree} is no kvpool")


def ways(old: Path | None, says: bool) -> Iterator[tuple[str, Build, Build]]:
    new = Build(name="new", weights="a", says=says)
    if old is not None:
        earlier = Build(
            name="old", weights="a", says=says, protocol=protocol_of(old), tree=old.resolve()
        )
        yield f"protocol {earlier.protocol} by {PROTOCOL}", earlier, new
        yield f"protocol {PROTOCOL} by {earlier.protocol}", new, earlier
    if says:
        yield "weights", new, Build(name="next", weights="b")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.upgrade", description=__doc__)
    parser.add_argument("--old", type=Path, help="a checkout of an earlier commit")
    parser.add_argument("--engine", default="nixl")
    parser.add_argument("--silent", action="store_true", help="no server says its weights")
    options = parser.parse_args(arguments)
    for title, before, after in ways(options.old, not options.silent):
        print(f"{title}: {counts(before, after, options.engine)}", flush=True)


def counts(before: Build, after: Build, engine: str) -> str:
    """Of a fleet in which every process is replaced once."""
    with tempfile.TemporaryDirectory() as folder, Fleet(before, engine, Path(folder)) as fleet:
        fleet.until_served()
        for place in PLACES:
            fleet.replace(place, after)
            fleet.until_served()
        fleet.finish()
        builds = {
            f"{prefill} to {decode}": fleet.counts.pop((prefill, decode))
            for prefill, decode in [key for key in fleet.counts if isinstance(key, tuple)]
        }
    return f"{dict(fleet.counts)}, answered by builds {builds}"


if __name__ == "__main__":
    main(sys.argv[1:])
