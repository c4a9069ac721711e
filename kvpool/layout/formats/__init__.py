"""What items hold, format by format, as templates: each stands here once. Pools place them, and
connectors describe an engine's tensors with them. Kinds of state (`MHA`) stand beside theirs.

`entries` is how many tokens, or compressed tokens, an item holds; counts are elements.
"""

from kvpool.layout.formats.attention import (
    FP4 as FP4,
    MHA as MHA,
    MLA as MLA,
    V4_PAGES as V4_PAGES,
    IndexKey as IndexKey,
    Order as Order,
    Ring as Ring,
    V4Latent as V4Latent,
    fp8_latent_row as fp8_latent_row,
    head_page as head_page,
    index_key_page as index_key_page,
    latent_row as latent_row,
    v4_latent_page as v4_latent_page,
)
from kvpool.layout.formats.kind import (
    At as At,
    Attention as Attention,
    BufferSpec as BufferSpec,
    Heads as Heads,
    Kind as Kind,
    PerRequest as PerRequest,
    Shard as Shard,
    StateType as StateType,
    scale_role as scale_role,
    scaled as scaled,
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
from kvpool.layout.formats.nvfp4 import (
    TILE as TILE,
    fp4_cells as fp4_cells,
    nvfp4_latent_row as nvfp4_latent_row,
    nvfp4_pages as nvfp4_pages,
    v_scale_tiles as v_scale_tiles,
)
