"""Layouts of existing tensors (`kvpool.layout.describe`)."""

from kvpool.layout.describe import (
    Described,
    Section,
    describe,
    describe_buffer,
    describe_opaque,
    describe_sections,
)

__all__ = [
    "Described",
    "Section",
    "describe",
    "describe_buffer",
    "describe_opaque",
    "describe_sections",
]
