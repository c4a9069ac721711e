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
    Described as Described,
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
from .layout.formats import (
    MHA as MHA,
    MLA as MLA,
    At as At,
    BufferSpec as BufferSpec,
    IndexKey as IndexKey,
    Kind as Kind,
    LinearState as LinearState,
    Ring as Ring,
    Shard as Shard,
    StateType as StateType,
    V4Latent as V4Latent,
    cca as cca,
    gated_delta_net as gated_delta_net,
    kda as kda,
    lightning as lightning,
    mamba1 as mamba1,
    mamba2 as mamba2,
    scaled as scaled,
    short_conv as short_conv,
)
from .layout.template import (
    Cell as Cell,
    Pad as Pad,
    Repeat as Repeat,
    Seq as Seq,
    Skip as Skip,
    Template as Template,
)
from .models import Declaration as Declaration, declare as declare
from .pools.access import BufInfos as BufInfos, StateBufInfos as StateBufInfos
from .pools.base import KVPool as KVPool
from .pools.offload import Saved as Saved
from .pools.states import LayeredPool as LayeredPool, State as State, UnionPool as UnionPool
from .pools.typed import (
    DSv4Pool as DSv4Pool,
    HybridLinearPool as HybridLinearPool,
    MHAPool as MHAPool,
    MLAPool as MLAPool,
    NSAPool as NSAPool,
    SWAPool as SWAPool,
)
from .version import __version__ as __version__
