"""What items hold, format by format, as templates: each stands here once. Pools place them, and
connectors describe an engine's tensors with them. A kind of state (`MHA`, `LinearState`, ..) stands
beside its templates.

`entries` is how many tokens, or compressed tokens, an item holds; counts are elements.
"""

from kvpool.layout.formats.attention import MHA as MHA, Order as Order, head_page as head_page
from kvpool.layout.formats.heads import Heads as Heads, Shard as Shard
from kvpool.layout.formats.index_key import IndexKey as IndexKey, index_key_page as index_key_page
from kvpool.layout.formats.kind import (
    At as At,
    Attention as Attention,
    BufferSpec as BufferSpec,
    Kind as Kind,
    StateType as StateType,
)
from kvpool.layout.formats.latent import (
    MLA as MLA,
    V4Latent as V4Latent,
    fp8_latent_row as fp8_latent_row,
    latent_row as latent_row,
    v4_latent_page as v4_latent_page,
)
from kvpool.layout.formats.linear import (
    ConvLayout as ConvLayout,
    ConvSection as ConvSection,
    LinearState as LinearState,
    cca as cca,
    conv_state as conv_state,
    gated_delta_net as gated_delta_net,
    kda as kda,
    lightning as lightning,
    mamba1 as mamba1,
    mamba2 as mamba2,
    short_conv as short_conv,
    temporal_state as temporal_state,
)
from kvpool.layout.formats.ring import Ring as Ring
from kvpool.layout.formats.scales import scale_role as scale_role, scaled as scaled
