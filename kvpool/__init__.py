"""Typed memory pools for the KV state of language models, described to the byte.

`import kvpool` is light: names load on first use, and `kvpool.layout` never loads torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.lazy import loader

if TYPE_CHECKING:
    from kvpool.allocator import Allocator as Allocator
    from kvpool.allocator import OutOfPages as OutOfPages
    from kvpool.bufinfos import StateType as StateType
    from kvpool.device import DeviceUnavailable as DeviceUnavailable
    from kvpool.item import Cell as Cell
    from kvpool.item import Pad as Pad
    from kvpool.item import Repeat as Repeat
    from kvpool.item import Seq as Seq
    from kvpool.item import Skip as Skip
    from kvpool.layout import Axis as Axis
    from kvpool.layout import Buffer as Buffer
    from kvpool.layout import LayoutError as LayoutError
    from kvpool.layout import PoolLayout as PoolLayout
    from kvpool.layout import Region as Region
    from kvpool.layout import RequestAddress as RequestAddress
    from kvpool.layout import Space as Space
    from kvpool.layout import Span as Span
    from kvpool.placement import Declared as Declared
    from kvpool.pool import KVPool as KVPool
    from kvpool.pools.dsv4 import DSv4Pool as DSv4Pool
    from kvpool.pools.hybrid_linear import HybridLinearPool as HybridLinearPool
    from kvpool.pools.mha import MHAPool as MHAPool
    from kvpool.pools.mla import MLAPool as MLAPool
    from kvpool.pools.nsa import NSAPool as NSAPool
    from kvpool.pools.swa import SWAPool as SWAPool
    from kvpool.shard import Shard as Shard
    from kvpool.states import MHA as MHA
    from kvpool.states import MLA as MLA
    from kvpool.states import IndexKey as IndexKey
    from kvpool.states import LinearState as LinearState

_HOME = {
    "Allocator": "allocator",
    "Axis": "layout",
    "Buffer": "layout",
    "Cell": "item",
    "DSv4Pool": "pools.dsv4",
    "Declared": "placement",
    "DeviceUnavailable": "device",
    "HybridLinearPool": "pools.hybrid_linear",
    "IndexKey": "states",
    "KVPool": "pool",
    "LayoutError": "layout",
    "LinearState": "states",
    "MHA": "states",
    "MHAPool": "pools.mha",
    "MLA": "states",
    "MLAPool": "pools.mla",
    "NSAPool": "pools.nsa",
    "OutOfPages": "allocator",
    "Pad": "item",
    "PoolLayout": "layout",
    "Region": "layout",
    "Repeat": "item",
    "RequestAddress": "layout",
    "SWAPool": "pools.swa",
    "Seq": "item",
    "Shard": "shard",
    "Skip": "item",
    "Space": "layout",
    "Span": "layout",
    "StateType": "bufinfos",
}

__all__ = [*_HOME]

__getattr__ = loader(__name__, _HOME)
