"""Layouts of existing tensors (`kvpool.layout.describe`)."""

from kvpool.layout.describe import describe, describe_buffer, describe_items, describe_pointers
from kvpool.layout.described import Described

__all__ = ["Described", "describe", "describe_buffer", "describe_items", "describe_pointers"]
