"""Typed memory pools for the KV state of language models, described to the byte.

`import kvpool` is light: names load on first use, and `kvpool.layout` never loads torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.lazy import exports

if TYPE_CHECKING:
    from kvpool.allocator import Allocator as Allocator
    from kvpool.allocator import OutOfPages as OutOfPages
    from kvpool.allocator import Request as Request
    from kvpool.device import Device as Device
    from kvpool.device import DeviceUnavailable as DeviceUnavailable
    from kvpool.device.quant import scaled as scaled
    from kvpool.layout import Axis as Axis
    from kvpool.layout import Buffer as Buffer
    from kvpool.layout import LayoutError as LayoutError
    from kvpool.layout import PoolLayout as PoolLayout
    from kvpool.layout import Region as Region
    from kvpool.layout import RequestAddress as RequestAddress
    from kvpool.layout import Slab as Slab
    from kvpool.layout import Space as Space
    from kvpool.layout import Span as Span
    from kvpool.layout.describe import Described as Described
    from kvpool.layout.template import Cell as Cell
    from kvpool.layout.template import Pad as Pad
    from kvpool.layout.template import Repeat as Repeat
    from kvpool.layout.template import Seq as Seq
    from kvpool.layout.template import Skip as Skip
    from kvpool.layout.template import Template as Template
    from kvpool.models import Declaration as Declaration
    from kvpool.pools.base import KVPool as KVPool
    from kvpool.pools.buf_infos import BufInfos as BufInfos
    from kvpool.pools.buf_infos import StateBufInfos as StateBufInfos
    from kvpool.pools.buf_infos import StateType as StateType
    from kvpool.pools.composite import CompositePool as CompositePool
    from kvpool.pools.dsv4 import DSv4Pool as DSv4Pool
    from kvpool.pools.hybrid_linear import HybridLinearPool as HybridLinearPool
    from kvpool.pools.kinds import MHA as MHA
    from kvpool.pools.kinds import MLA as MLA
    from kvpool.pools.kinds import At as At
    from kvpool.pools.kinds import IndexKey as IndexKey
    from kvpool.pools.kinds import Kind as Kind
    from kvpool.pools.kinds import LinearState as LinearState
    from kvpool.pools.kinds import Ring as Ring
    from kvpool.pools.kinds import V4Latent as V4Latent
    from kvpool.pools.kinds import gated_delta_net as gated_delta_net
    from kvpool.pools.kinds import kda as kda
    from kvpool.pools.kinds import mamba2 as mamba2
    from kvpool.pools.mha import MHAPool as MHAPool
    from kvpool.pools.mla import MLAPool as MLAPool
    from kvpool.pools.nsa import NSAPool as NSAPool
    from kvpool.pools.offload import Saved as Saved
    from kvpool.pools.placement import BufferSpec as BufferSpec
    from kvpool.pools.placement import Declared as Declared
    from kvpool.pools.placement import Shard as Shard
    from kvpool.pools.swa import SWAPool as SWAPool
    from kvpool.version import __version__ as __version__

__all__, __dir__, __getattr__ = exports(
    __name__,
    {
        "allocator": "Allocator OutOfPages Request",
        "device": "Device DeviceUnavailable",
        "device.quant": "scaled",
        "layout": "Axis Buffer LayoutError PoolLayout Region RequestAddress Slab Space Span",
        "layout.describe": "Described",
        "layout.template": "Cell Pad Repeat Seq Skip Template",
        "models": "Declaration",
        "pools.base": "KVPool",
        "pools.buf_infos": "BufInfos StateBufInfos StateType",
        "pools.composite": "CompositePool",
        "pools.dsv4": "DSv4Pool",
        "pools.hybrid_linear": "HybridLinearPool",
        "pools.kinds": "MHA MLA At IndexKey Kind LinearState Ring V4Latent "
        "gated_delta_net kda mamba2",
        "pools.mha": "MHAPool",
        "pools.mla": "MLAPool",
        "pools.nsa": "NSAPool",
        "pools.offload": "Saved",
        "pools.placement": "BufferSpec Declared Shard",
        "pools.swa": "SWAPool",
        "version": "__version__",
    },
)
