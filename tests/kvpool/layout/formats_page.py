"""docs/formats.md: every format to the byte, from the item templates of the pools.

python -m tests.kvpool.layout.formats_page > docs/formats.md
"""

from __future__ import annotations

from typing import Any

from kvpool.layout.formats import (
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
from tests.kvpool.layout.formats_markdown import Format, page

HEAD = """# Formats, to the byte

The bytes of every kind of state, with the numbers of one model each. For your model, as a picture:
`kvpool describe MODEL --html page.html`.

- An item is what one id addresses: a page of entries, a slot or a ring. Item 0 of every buffer is
  padding.
- Offsets are in bytes from the start of an item. Steps of an axis count from 0.
- A cell is contiguous, with its elements in order.
- The numbers are those of a rank that holds all heads.

Sources are released packages, read in November 2026: sglang 0.5.23, vllm 0.33.0, vllm-ascend
0.23.0. "kvpool's own" marks formats that no engine uses.

`python -m tests.kvpool.layout.formats_page > docs/formats.md` writes this page from the item
templates of the pools (`kvpool/layout/formats`). A test compares the page with the templates, and
its numbers with numbers worked out by hand.
"""
SGLANG, VLLM, ASCEND = "sglang 0.5.23", "vllm 0.33.0", "vllm-ascend 0.23.0"
OWN = "kvpool's own"
C4_RING = (
    f"{SGLANG}: position p is at step p mod 8 of a ring. On NVIDIA GPUs each window page has a "
    "ring: row `swa_page * 8 + swa_loc % 8` (`c_plan.cuh`). With unified KV, and on Ascend A5, "
    "each request has one. `DSv4Pool` has a ring per request, with `page_rings=True` a ring per "
    "page. The rows are the same, so state can be transferred between the two."
)
DS = f"{VLLM} with `VLLM_SSM_CONV_STATE_LAYOUT=DS`: conv `(channels, kernel - 1)`"
BOTH = f"{SGLANG} and {VLLM}"
GDN: dict[str, Any] = {"k_heads": 16, "v_heads": 32, "k_dim": 128, "v_dim": 128, "kernel": 4}
KDA: dict[str, Any] = {"heads": 32, "dim": 128, "kernel": 4}
MAMBA2: dict[str, Any] = {"heads": 128, "head_dim": 64, "groups": 8, "state_size": 128, "kernel": 4}
SLOT: dict[str, Any] = {"entries": 1, "item": "slot"}
V4 = (
    "all rows of 576 bytes (448 e4m3, 64 bf16 rope), then all scales, 7 ue8m0 and an unused "
    "byte per entry; the page is padded to a multiple of 576"
)

FORMATS = (
    Format(
        "MHA bf16, NHD",
        "Llama-3.1-70B: 8 KV heads of 128; the heads of a token are adjacent.",
        f"{BOTH}: K and V in separate tensors, `[entry, head, dim]` in each page.",
        MHA(8, 128),
    ),
    Format(
        "MHA bf16, HND",
        "The same, but the tokens of a head are adjacent.",
        f"{VLLM} with the HND stride order: `[head, entry, dim]` in each page.",
        MHA(8, 128, order="hnd"),
    ),
    Format(
        "MHA fp8, NHD",
        "e4m3 values. Separate buffers have a float32 scale per token and head.",
        f"{OWN}.",
        MHA(8, 128),
        "fp8",
    ),
    Format(
        "MHA mxfp8, NHD",
        "e4m3 values. Separate buffers have a ue8m0 scale per 32 values.",
        f"OCP Microscaling Formats 1.0 (MXFP8) for elements and scales; the buffers are {OWN}.",
        MHA(8, 128),
        "mxfp8",
    ),
    Format(
        "Sliding-window MHA bf16",
        "gpt-oss-120b: 8 KV heads of 64. A page is as long as the window (128 tokens).",
        f"{BOTH}: as MHA pages, with page ids of their own.",
        MHA(8, 64),
        entries=128,
        prefix="swa.",
    ),
    Format(
        "MLA bf16",
        "DeepSeek-V3: 512 latent and 64 rope elements in one row per token, equal on every rank.",
        f"{BOTH}. {ASCEND} has latent and rope in two tensors, which are the same two regions.",
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
        f"{ASCEND}, with the layers stacked in one tensor.",
        IndexKey(),
    ),
    Format(
        "Index key fp8, 132 bytes",
        "DeepSeek-V3.2: each page has all keys, then all scales, one per 128 elements.",
        f"{BOTH}.",
        IndexKey(),
        "fp8",
    ),
    Format(
        "DeepSeek-V4 window latent bf16",
        "448 latent and 64 rope elements, shared by K and V. A page is as long as the window (128 "
        "tokens).",
        f"{OWN}; the rows of the fp8 format, not quantised.",
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
        "64 entries of 4 tokens in a page of 256 tokens; otherwise as other index keys.",
        f"{SGLANG}.",
        IndexKey(),
        "fp8",
        tokens=4,
        prefix="c4.",
    ),
    Format(
        "DeepSeek-V4 compressor state, ratio 4",
        "Keys and gates of the last tokens, in two series because compression windows overlap: "
        "2 x 2 x 512 float32 per token. With speculation the ring has 16 entries.",
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
        "Keys and gates of the tokens that are not yet compressed: 2 x 512 float32 per token. With "
        "speculation the ring has 256 entries.",
        f"{SGLANG}: position p is at step p mod 128.",
        Ring("state", 2 * 512),
        entries=128,
        item="ring",
        prefix="c128.",
    ),
    Format(
        "Gated DeltaNet, channels first",
        "Qwen3-Next-80B-A3B: the last 3 inputs of a convolution over q, k and v, and 32 heads of "
        "temporal state.",
        f"{BOTH}: conv `(channels, kernel - 1)`, temporal `(v_heads, Dv, Dk)` on a GPU. kvpool has "
        "`(v_heads, Dk, Dv)`; a transfer between the two transposes.",
        gated_delta_net(**GDN),
        **SLOT,
    ),
    Format(
        "Gated DeltaNet, taps first",
        "The same, with `tap` as the outermost axis.",
        f"{ASCEND}: conv `(kernel - 1, channels)`.",
        gated_delta_net(**GDN, conv_layout="taps_first"),
        **SLOT,
    ),
    Format(
        "Kimi Delta Attention, taps first",
        "Kimi-Linear-48B: q, k and v over the same 32 heads.",
        f"{SGLANG}: conv `(kernel - 1, channels)`, temporal `(heads, Dv, Dk)` on a GPU. kvpool has "
        "`(heads, Dk, Dv)`; a transfer between the two transposes.",
        kda(**KDA),
        **SLOT,
    ),
    Format(
        "Kimi Delta Attention, channels first",
        "The same, with `tap` as the innermost axis.",
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
        "The same, with `tap` as the outermost axis.",
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
        "Zaya, in addition to keys and values: the last 2 inputs of convolutions over 8 heads of q "
        "and 2 of k, and 128 values of the last token.",
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
