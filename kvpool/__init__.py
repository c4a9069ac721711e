"""Typed memory pools for the KV state of language models, described to the byte.

`import kvpool` is light: names load on first use, and `kvpool.layout` never loads torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpool.allocator import Allocator, OutOfPages
    from kvpool.device import DeviceUnavailable
    from kvpool.item import Cell, Pad, Repeat, Seq, Skip
    from kvpool.layout import (
        Axis,
        Buffer,
        LayoutError,
        PoolLayout,
        Region,
        RequestAddress,
        Space,
        Span,
    )
    from kvpool.pool import Declared, KVPool, Shard
    from kvpool.pools.mha import MHAPool
    from kvpool.pools.mla import MLAPool

_HOME = {
    "Allocator": "allocator",
    "Axis": "layout",
    "Buffer": "layout",
    "Cell": "item",
    "Declared": "pool",
    "DeviceUnavailable": "device",
    "KVPool": "pool",
    "LayoutError": "layout",
    "MHAPool": "pools.mha",
    "MLAPool": "pools.mla",
    "OutOfPages": "allocator",
    "Pad": "item",
    "PoolLayout": "layout",
    "Region": "layout",
    "Repeat": "item",
    "RequestAddress": "layout",
    "Seq": "item",
    "Shard": "pool",
    "Skip": "item",
    "Space": "layout",
    "Span": "layout",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kvpool' has no attribute {name!r}")
    return getattr(importlib.import_module(f"kvpool.{_HOME[name]}"), name)
