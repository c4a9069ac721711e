"""Typed memory pools for the KV state of language models, described to the byte.

`import kvpool` is light: names load on first use, and `kvpool.layout` never loads torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.lazy import loader

if TYPE_CHECKING:
    from kvpool.allocator import Allocator as Allocator
    from kvpool.allocator import OutOfPages as OutOfPages
    from kvpool.device import DeviceUnavailable as DeviceUnavailable
    from kvpool.layout import Axis as Axis
    from kvpool.layout import Buffer as Buffer
    from kvpool.layout import LayoutError as LayoutError
    from kvpool.layout import PoolLayout as PoolLayout
    from kvpool.layout import Region as Region
    from kvpool.layout import RequestAddress as RequestAddress
    from kvpool.layout import Space as Space
    from kvpool.layout import Span as Span
    from kvpool.layout.template import Cell as Cell
    from kvpool.layout.template import Pad as Pad
    from kvpool.layout.template import Repeat as Repeat
    from kvpool.layout.template import Seq as Seq
    from kvpool.layout.template import Skip as Skip
    from kvpool.pools.base import KVPool as KVPool
    from kvpool.pools.buf_infos import StateType as StateType
    from kvpool.pools.dsv4 import DSv4Pool as DSv4Pool
    from kvpool.pools.hybrid_linear import HybridLinearPool as HybridLinearPool
    from kvpool.pools.kinds import MHA as MHA
    from kvpool.pools.kinds import MLA as MLA
    from kvpool.pools.kinds import IndexKey as IndexKey
    from kvpool.pools.kinds import LinearState as LinearState
    from kvpool.pools.mha import MHAPool as MHAPool
    from kvpool.pools.mla import MLAPool as MLAPool
    from kvpool.pools.nsa import NSAPool as NSAPool
    from kvpool.pools.placement import BufferSpec as BufferSpec
    from kvpool.pools.placement import BufferSpec as Declared  # noqa: F401
    from kvpool.pools.placement import Shard as Shard
    from kvpool.pools.swa import SWAPool as SWAPool

_HOME = {
    "Allocator": "allocator",
    "Axis": "layout",
    "Buffer": "layout",
    "Cell": "layout.template",
    "DSv4Pool": "pools.dsv4",
    "BufferSpec": "pools.placement",
    "Declared": "pools.placement:BufferSpec",
    "DeviceUnavailable": "device",
    "HybridLinearPool": "pools.hybrid_linear",
    "IndexKey": "pools.kinds",
    "KVPool": "pools.base",
    "LayoutError": "layout",
    "LinearState": "pools.kinds",
    "MHA": "pools.kinds",
    "MHAPool": "pools.mha",
    "MLA": "pools.kinds",
    "MLAPool": "pools.mla",
    "NSAPool": "pools.nsa",
    "OutOfPages": "allocator",
    "Pad": "layout.template",
    "PoolLayout": "layout",
    "Region": "layout",
    "Repeat": "layout.template",
    "RequestAddress": "layout",
    "SWAPool": "pools.swa",
    "Seq": "layout.template",
    "Shard": "pools.placement",
    "Skip": "layout.template",
    "Space": "layout",
    "Span": "layout",
    "StateType": "pools.buf_infos",
}

__all__ = [*_HOME]

__getattr__ = loader(__name__, _HOME)
