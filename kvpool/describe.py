"""Layouts of existing tensors (`kvpool.layout.describe`, `describe_items`)."""

from kvpool.layout.describe import (
    Section,
    describe,
    describe_buffer,
    describe_pointers,
    describe_sections,
)
from kvpool.layout.describe_items import describe_items, describe_opaque
from kvpool.layout.described import Described

__all__ = [
    "Described",
    "Section",
    "describe",
    "describe_buffer",
    "describe_items",
    "describe_opaque",
    "describe_pointers",
    "describe_sections",
]
