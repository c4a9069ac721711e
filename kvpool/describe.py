"""Layouts of existing tensors (`kvpool.layout.describe`)."""

from kvpool.layout.describe import Described, describe, describe_buffer

__all__ = ["Described", "describe", "describe_buffer"]
