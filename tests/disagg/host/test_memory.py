"""Memory is the host's, or what the control groups of a container leave of it."""

from __future__ import annotations

import os

import pytest

from disagg.host.memory import host_memory

PHYSICAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
MIB = 1 << 20


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        ("0::/\n", {}, PHYSICAL),
        ("0::/\n", {"memory.max": "max"}, PHYSICAL),
        ("0::/\n", {"memory.max": 5 * MIB}, 5 * MIB),
        ("0::/a/b\n", {"memory.max": "max", "a/memory.max": 3 * MIB, "a/b/memory.max": 4 * MIB},
         3 * MIB),
        ("0::/\n", {"memory.max": 1 << 62}, PHYSICAL),
        ("9:cpu:/\n4:memory,hugetlb:/a/b\n0::/\n", {"memory/a/b/memory.limit_in_bytes": 6 * MIB},
         6 * MIB),
        ("4:memory:/of/the/host\n", {"memory/memory.limit_in_bytes": 7 * MIB}, 7 * MIB),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": 9223372036854771712}, PHYSICAL),
        ("4:cpu:/\n", {"memory/memory.limit_in_bytes": 8 * MIB, "memory.max": 9 * MIB}, PHYSICAL),
        (None, {"memory.max": 9 * MIB}, PHYSICAL),
    ],
)  # fmt: skip
def test_the_lowest_limit_counts(own, limits, expected, tmp_path):
    for name, value in limits.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    if own is not None:
        (tmp_path / "own").write_text(own)
    assert host_memory(tmp_path / "own", tmp_path / "cgroup") == expected


def test_this_process_has_memory():
    assert MIB < host_memory() <= PHYSICAL
