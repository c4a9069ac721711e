"""docs/formats.md: every format to the byte, from the item templates of the pools.

python -m kvpool.cli.formats > docs/formats.md
"""

from __future__ import annotations

from typing import Any

from kvpool.pools.kinds import (
    MHA,
    MLA,
    IndexKey,
    Ring,
    V4Latent,
    cca,
    gated_delta_net,
    kda,
    lightning,
    mamba1,
    mamba2,
    short_conv,
)
from kvpool.render.markdown import Format, page

HEAD = """# Formats, to the byte

Written by `python -m kvpool.cli.formats > docs/formats.md` from the item templates of the pools
(`kvpool/pools/kinds.py`). A test compares this file with the templates, and its numbers with
numbers computed by hand. For your model, as a picture: `kvpool describe MODEL --html page.html`.

An item is what one id addresses: a page of entries, a slot, a ring. Offsets are in bytes from the
start of an item; steps count from 0. A cell is contiguous, its elements in order. The numbers are
those of a rank that holds all heads. Item 0 of every buffer is padding.

Sources are released packages: sglang 0.5.23, vllm 0.33.0, vllm-ascend 0.23.0, read in November
2026. Formats that only kvpool has are marked so.
"""
SGLANG, VLLM, ASCEND = "sglang 0.5.23", "vllm 0.33.0", "vllm-ascend 0.23.0"
OWN = "kvpool's own"
C4_RING = (
    f"{SGLANG}, position p at p mod 8: on NVIDIA GPUs in a ring of each page of the window, row "
    "`swa_page * 8 + swa_loc % 8` (`c_plan.cuh`), with unified KV and on Ascend A5 in a ring of "
    "each request. `DSv4Pool` has rings of requests, with `page_rings=True` those of pages. The "
    "rows are the same, and the two pair."
)
DS = f"{VLLM} with `VLLM_SSM_CONV_STATE_LAYOUT=DS`: conv `(channels, kernel - 1)`"
BOTH = f"{SGLANG} and {VLLM}"
GDN: dict[str, Any] = {"k_heads": 16, "v_heads": 32, "k_dim": 128, "v_dim": 128, "kernel": 4}
KDA: dict[str, Any] = {"heads": 32, "dim": 128, "kernel": 4}
MAMBA2: dict[str, Any] = {"heads": 128, "head_dim": 64, "groups": 8, "state_size": 128, "kernel": 4}
SLOT: dict[str, Any] = {"entries": 1, "item": "slot"}
V4 = (
    "all rows of 576 bytes (448 e4m3, 64 bf16 rope), then all scales, 7 ue8m0 and a spare byte per "
    "entry; the page is padded to a multiple of 576"
)

FORMATS = (
    Format(
        "MHA bf16, NHD",
        "Llama-3.1-70B: 8 KV heads of 128; the heads of a token are adjacent.",
        f"{BOTH}: K and V apart, `[entry, head, dim]`.",
        MHA(8, 128),
    ),
    Format(
        "MHA bf16, HND",
        "The same, but the tokens of a head are adjacent.",
        f"{VLLM}, whose cache has stride orders: `[head, entry, dim]` in each page.",
        MHA(8, 128, order="hnd"),
    ),
    Format(
        "MHA fp8, NHD",
        "e4m3 values, and in buffers of their own a float32 scale per token and head.",
        f"{OWN}.",
        MHA(8, 128),
        "fp8",
    ),
    Format(
        "MHA mxfp8, NHD",
        "e4m3 values, and in buffers of their own a ue8m0 scale per 32 values.",
        f"elements and scales: OCP Microscaling Formats 1.0 (MXFP8); the buffers are {OWN}.",
        MHA(8, 128),
        "mxfp8",
    ),
    Format(
        "Sliding-window MHA bf16",
        "gpt-oss-120b: 8 KV heads of 64 in pages of the window (128 tokens).",
        f"{BOTH}: as any MHA page, with its own ids.",
        MHA(8, 64),
        entries=128,
        prefix="swa.",
    ),
    Format(
        "MLA bf16",
        "DeepSeek-V3: 512 latent and 64 rope elements in one row a token, the same on every rank.",
        f"{BOTH}. {ASCEND} has latent and rope in two tensors: the same two regions.",
        MLA(),
    ),
    Format(
        "MLA fp8, 656 bytes",
        "DeepSeek-V3.2: 512 e4m3, a float32 scale per 128 of them, 64 bf16 rope.",
        f"FlashMLA's sparse fp8 format, as in {BOTH}.",
        MLA(),
        "fp8",
    ),
    Format(
        "Index key bf16",
        "A sparse indexer's key of 128 elements, not quantised.",
        f"{ASCEND}, which stacks layers in one tensor.",
        IndexKey(),
    ),
    Format(
        "Index key fp8, 132 bytes",
        "DeepSeek-V3.2: in each page all keys, then all scales, one per 128 elements.",
        f"{BOTH}.",
        IndexKey(),
        "fp8",
    ),
    Format(
        "DeepSeek-V4 window latent bf16",
        "448 latent and 64 rope elements, shared by K and V, in pages of the window (128 tokens).",
        f"{OWN}: the rows of the fp8 format, not quantised.",
        V4Latent(),
        entries=128,
        prefix="swa.",
    ),
    Format(
        "DeepSeek-V4 window latent fp8, 584 bytes",
        f"In pages of 128 tokens: {V4}.",
        f"{SGLANG}.",
        V4Latent(),
        "fp8",
        entries=128,
        prefix="swa.",
    ),
    Format(
        "DeepSeek-V4 compressed latent fp8, ratio 4",
        f"64 entries of 4 tokens in a page of 256 tokens: {V4}.",
        f"{SGLANG}.",
        V4Latent(),
        "fp8",
        tokens=4,
        prefix="c4.",
    ),
    Format(
        "DeepSeek-V4 compressed latent fp8, ratio 128",
        f"2 entries of 128 tokens in a page of 256 tokens: {V4}.",
        f"{SGLANG}.",
        V4Latent(),
        "fp8",
        entries=2,
        tokens=128,
        prefix="c128.",
    ),
    Format(
        "DeepSeek-V4 index key fp8",
        "64 entries of 4 tokens in a page of 256 tokens, as any index key.",
        f"{SGLANG}.",
        IndexKey(),
        "fp8",
        tokens=4,
        prefix="c4.",
    ),
    Format(
        "DeepSeek-V4 compressor state, ratio 4",
        "Keys and gates of the last tokens, in two series as windows overlap: 2 x 2 x 512 float32 "
        "per token. With speculation the ring has 16 entries.",
        C4_RING,
        Ring("state", 2 * 2 * 512),
        entries=8,
        item="ring",
        prefix="c4.",
    ),
    Format(
        "DeepSeek-V4 indexer compressor state, ratio 4",
        "The same for index keys: 2 x 2 x 128 float32 per token.",
        C4_RING,
        Ring("index_state", 2 * 2 * 128),
        entries=8,
        item="ring",
        prefix="c4.",
    ),
    Format(
        "DeepSeek-V4 compressor state, ratio 128",
        "Keys and gates of the open window: 2 x 512 float32 per token. With speculation the ring "
        "has 256 entries.",
        f"{SGLANG}; position p at p mod 128.",
        Ring("state", 2 * 512),
        entries=128,
        item="ring",
        prefix="c128.",
    ),
    Format(
        "Gated DeltaNet, channels first",
        "Qwen3-Next-80B-A3B: the last 3 inputs of a convolution over q, k and v, and 32 heads of "
        "temporal state.",
        f"{BOTH}: conv `(channels, kernel - 1)`, temporal `(v_heads, Dv, Dk)` on a GPU, where this "
        "has `(v_heads, Dk, Dv)`: the same region.",
        gated_delta_net(**GDN),
        **SLOT,
    ),
    Format(
        "Gated DeltaNet, taps first",
        "The same with the taps outermost.",
        f"{ASCEND}: conv `(kernel - 1, channels)`.",
        gated_delta_net(**GDN, conv_layout="taps_first"),
        **SLOT,
    ),
    Format(
        "Kimi Delta Attention, taps first",
        "Kimi-Linear-48B: q, k and v over the same 32 heads.",
        f"{SGLANG}: conv `(kernel - 1, channels)`, temporal `(heads, Dv, Dk)` on a GPU: the same "
        "region.",
        kda(**KDA),
        **SLOT,
    ),
    Format(
        "Kimi Delta Attention, channels first",
        "The same with the taps innermost.",
        f"{OWN}.",
        kda(**KDA, conv_layout="channels_first"),
        **SLOT,
    ),
    Format(
        "Mamba-2, channels first",
        "128 heads of 64, 8 groups, a state of 128: a convolution over x, B and C.",
        f"{SGLANG}: conv `(channels, kernel - 1)`, temporal `(heads, head_dim, state_size)`.",
        mamba2(**MAMBA2),
        **SLOT,
    ),
    Format(
        "Mamba-2, taps first",
        "The same with the taps outermost.",
        f"{ASCEND}: conv `(kernel - 1, channels)`.",
        mamba2(**MAMBA2, conv_layout="taps_first"),
        **SLOT,
    ),
    Format(
        "Mamba-1, channels first",
        "Falcon-Mamba-7B: 8,192 channels, each with a state of 16.",
        f"{DS}, temporal `(channels, state_size)`.",
        mamba1(8192, 16, 4),
        **SLOT,
    ),
    Format(
        "Short convolution, channels first",
        "LFM2-1.2B: the last 2 inputs of a convolution over 2,048 channels, and nothing else.",
        f"{DS}.",
        short_conv(2048, 3),
        **SLOT,
    ),
    Format(
        "Lightning attention",
        "MiniMax-Text-01: 64 heads of temporal state in the pool's dtype, and nothing else.",
        f"{OWN}, with the dims of {VLLM}: `(heads, D, D)`.",
        lightning(64, 128),
        **SLOT,
    ),
    Format(
        "Compressed convolutional attention",
        "Zaya, beside keys and values: 2 inputs of convolutions over 8 heads of q and 2 of k, and "
        "128 values of the last token.",
        f"{OWN}.",
        cca(8, 2, 128, (2, 2)),
        **SLOT,
    ),
)


def document() -> str:
    """docs/formats.md."""
    return page(HEAD, FORMATS)


if __name__ == "__main__":
    print(document(), end="")
