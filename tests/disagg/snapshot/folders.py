"""Files of several ranks, in a folder of their own."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from disagg.snapshot import save


@contextmanager
def saved(holders, addresses, **options):
    """A file of each holder's request; all of one request."""
    with TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.kv" for number in range(len(holders))]
        for path, holder, address in zip(paths, holders, addresses, strict=True):
            save(path, holder.layout, address, **{"request": "r", **options})
        yield paths
