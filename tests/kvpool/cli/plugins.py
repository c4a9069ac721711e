"""Packages of other vendors."""

from __future__ import annotations

from pathlib import Path


def package(root: Path, name: str, entry_points: str) -> None:
    """Metadata of an installed package in the folder `root`."""
    info = root / f"{name.replace('-', '_')}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(entry_points)
