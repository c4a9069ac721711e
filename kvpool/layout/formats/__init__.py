"""What items hold, format by format, as templates: each stands here once. Pools place them, and
connectors describe an engine's tensors with them.

`entries` is how many tokens, or compressed tokens, an item holds; counts are elements.
"""

from kvpool.layout.formats.attention import head_page
from kvpool.layout.formats.heads import Heads
from kvpool.layout.formats.index_key import index_key_page
from kvpool.layout.formats.latent import fp8_latent_row, latent_row, v4_latent_page
from kvpool.layout.formats.linear import ConvSection, conv_state, temporal_state
from kvpool.layout.formats.scales import scale_role, scaled

__all__ = [
    "ConvSection",
    "Heads",
    "conv_state",
    "fp8_latent_row",
    "head_page",
    "index_key_page",
    "latent_row",
    "scale_role",
    "scaled",
    "temporal_state",
    "v4_latent_page",
]
