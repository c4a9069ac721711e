"""A request's state as a file: saved by one rank, loaded by ranks of any other geometry.

A file is one more source of memory. It has a layout, as a pool has, with offsets in the file for
pointers; plans move bytes to it and from it. `docs/snapshots.md` has the format.
"""

from disagg.snapshot.header import Header, SnapshotRefused
from disagg.snapshot.requests import check, inspect, load, save

__all__ = ["Header", "SnapshotRefused", "check", "inspect", "load", "save"]
