"""Where objects lie: floors, by URL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from disagg.store.floors.url import parse_url

if TYPE_CHECKING:
    from disagg.store.floors.base import Floor


def open_floor(url: str, *, notes_use: bool = True) -> Floor:
    """The floor of a URL: memory://name, file:///path, s3://bucket/prefix, gs://bucket/prefix,
    az://container/prefix, mooncake://host:port. The first call asks the network, this does not.
    Without `notes_use`, what is read does not count as used: for commands that only look.

    Raises ValueError for another URL, MissingExtra without the package that it needs, and
    FloorError for a path that cannot be used.
    """
    parsed = parse_url(url)
    if parsed.scheme == "mooncake":
        from disagg.store.floors.mooncake import MooncakeFloor

        return MooncakeFloor(parsed)
    if parsed.scheme == "file":
        from disagg.store.floors.folder import FolderFloor

        return FolderFloor(parsed, notes_use)
    from disagg.store.floors.object_store import ObjectFloor

    return ObjectFloor(parsed)
