from .allocation.allocator import (
    Allocator as Allocator,
    OutOfPages as OutOfPages,
    Request as Request,
)
from .allocation.prefix_cache import (
    PinnedPrefix as PinnedPrefix,
    PrefixCache as PrefixCache,
    PrefixStats as PrefixStats,
)
from .device import Device as Device, DeviceUnavailable as DeviceUnavailable
from .layout import (
    Axis as Axis,
    Buffer as Buffer,
    Interleave as Interleave,
    LayoutError as LayoutError,
    PoolLayout as PoolLayout,
    Region as Region,
    RequestAddress as RequestAddress,
    RequestPinned as RequestPinned,
    Slab as Slab,
    Space as Space,
    Span as Span,
)
from .layout.described import Described as Described
from .layout.formats.scales import scaled as scaled
from .layout.template import (
    Cell as Cell,
    Pad as Pad,
    Repeat as Repeat,
    Seq as Seq,
    Skip as Skip,
    Template as Template,
)
from .models import Declaration as Declaration
from .pools.base import KVPool as KVPool
from .pools.buf_infos import (
    BufInfos as BufInfos,
    StateBufInfos as StateBufInfos,
    StateType as StateType,
)
from .pools.composite import UnionPool as UnionPool
from .pools.dsv4 import DSv4Pool as DSv4Pool
from .pools.hybrid_linear import HybridLinearPool as HybridLinearPool
from .pools.kinds import (
    MHA as MHA,
    MLA as MLA,
    At as At,
    IndexKey as IndexKey,
    Kind as Kind,
    LinearState as LinearState,
    Ring as Ring,
    V4Latent as V4Latent,
    cca as cca,
    gated_delta_net as gated_delta_net,
    kda as kda,
    lightning as lightning,
    mamba1 as mamba1,
    mamba2 as mamba2,
    short_conv as short_conv,
)
from .pools.layered import LayeredPool as LayeredPool, State as State
from .pools.mha import MHAPool as MHAPool
from .pools.mla import MLAPool as MLAPool, NSAPool as NSAPool
from .pools.offload import Saved as Saved
from .pools.placement import BufferSpec as BufferSpec, Shard as Shard
from .pools.swa import SWAPool as SWAPool
from .version import __version__ as __version__
