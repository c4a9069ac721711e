"""What items hold, format by format, as templates: each stands here once. Pools place them, and
connectors describe an engine's tensors with them. A kind of state (`MHA`, `LinearState`, ..) stands
beside its templates.

`entries` is how many tokens, or compressed tokens, an item holds; counts are elements.
"""

from kvpool.layout.formats.attention import MHA, Order, head_page
from kvpool.layout.formats.heads import Heads, Shard
from kvpool.layout.formats.index_key import IndexKey, index_key_page
from kvpool.layout.formats.kind import At, BufferSpec, Kind, StateType
from kvpool.layout.formats.latent import MLA, V4Latent, fp8_latent_row, latent_row, v4_latent_page
from kvpool.layout.formats.linear import (
    ConvLayout,
    ConvSection,
    LinearState,
    cca,
    conv_state,
    gated_delta_net,
    kda,
    lightning,
    mamba1,
    mamba2,
    short_conv,
    temporal_state,
)
from kvpool.layout.formats.ring import Ring
from kvpool.layout.formats.scales import scale_role, scaled

__all__ = [
    "MHA",
    "MLA",
    "At",
    "BufferSpec",
    "ConvLayout",
    "ConvSection",
    "Heads",
    "IndexKey",
    "Kind",
    "LinearState",
    "Order",
    "Ring",
    "Shard",
    "StateType",
    "V4Latent",
    "cca",
    "conv_state",
    "fp8_latent_row",
    "gated_delta_net",
    "head_page",
    "index_key_page",
    "kda",
    "latent_row",
    "lightning",
    "mamba1",
    "mamba2",
    "scale_role",
    "scaled",
    "short_conv",
    "temporal_state",
    "v4_latent_page",
]
