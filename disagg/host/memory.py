"""How much memory this process may have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def host_memory(own: Path = OWN_CGROUPS, root: Path = CGROUPS) -> int:
    """Bytes of the host's memory, or of the part of it that this process's container may have.
    `own` says which control groups this process is in, below `root`.
    """
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *_limits(own, root)])


def _limits(own: Path, root: Path) -> Iterator[int]:
    """Limits of this process's control groups and of all above them."""
    lines: list[str] = []
    with suppress(OSError):
        lines = own.read_text().splitlines()
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":  # version 2
            top, limit = root, "memory.max"
        elif "memory" in controllers.split(","):
            top, limit = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        folder = top / group.lstrip("/")
        # in a container the path may be the host's: then its own limit lies at the top
        for place in (folder, *folder.parents):
            with suppress(OSError, ValueError):  # no such file, or "max"
                yield int((place / limit).read_text())
            if place == top:
                break
