"""Layouts of existing tensors (`kvpool.layout.describe`)."""

from kvpool.layout import Described
from kvpool.layout.describe import describe, describe_buffer, describe_items, describe_pointers

__all__ = ["Described", "describe", "describe_buffer", "describe_items", "describe_pointers"]
