"""A tiny DeepSeek-V4, as transformers saves it and as vLLM reads it, and what vLLM 0.32 needs to
run it on a CPU without Triton.

Its CPU build has compiled kernels for all of V4 that reads or writes state. What prepares a step
for them is in Triton kernels, of which there is no build for these CPUs, and one table lacks keys
of V4.1. `enable` puts plain torch in their place, by the same arithmetic; no state is touched in
it. Kernels whose results the CPU layers do not read (`forward_mqa` and, up to 512 compressed
tokens, the indexer find their rows by the block table themselves) do nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV4Config, PreTrainedConfig

RATIOS = (0, 4, 128, 4)


def deepseek_v4() -> PreTrainedConfig:
    """A layer of windows alone, two that compress 4 tokens to one, one that compresses 128."""
    sizes = {"hidden_size": 256, "num_hidden_layers": len(RATIOS), "num_attention_heads": 4}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3, "vocab_size": 512}
    return DeepseekV4Config(
        **sizes,
        **experts,
        **tokens,
        compress_ratios=[*RATIOS],
        q_lora_rank=128,
        o_lora_rank=64,
        o_groups=2,
        index_n_heads=8,
        hc_mult=2,
        mlp_layer_types=["moe"] * len(RATIOS),
        max_position_embeddings=8192,
        num_nextn_predict_layers=0,
    )


NAMES = {
    "model.": "",
    "embed_tokens.": "embed.",
    "hc_head.hc_": "hc_head_",
    "attn.norm.": "attn.kv_norm.",
}
"""What transformers does not name as the checkpoints do."""


def finish(place: Path) -> None:
    """Names weights as DeepSeek does, and gives values to what transformers leaves at 0. Experts
    are chosen by softmax: vLLM's CPU kernels for V4's own ways take hundreds of experts.
    """
    file, described = place / "model.safetensors", place / "config.json"
    source, weights = torch.Generator().manual_seed(0), {}
    for name, tensor in load_file(file).items():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        if name.endswith("gate.bias"):  # of the other ways
            continue
        if name.endswith((".ape", ".attn_sink")) or "hc_" in name:
            noise = torch.randn(tensor.shape, generator=source)
            tensor = noise if name.endswith(".ape") else tensor + 0.3 * noise
        weights[name] = tensor.contiguous()
    save_file(weights, file, {"format": "pt"})
    config = json.loads(described.read_text())
    for transformers_own in ("layer_types", "mlp_layer_types", "compress_rates"):
        del config[transformers_own]
    config |= {"compress_ratios": RATIOS, "qk_rope_head_dim": 64}
    config |= {"num_hash_layers": 0, "scoring_func": "softmax"}
    described.write_text(json.dumps(config))


RECORDS = {584: (576, 7, 8), 132: (128, 4, 4)}
"""Of entries of 584 and 132 bytes, those of a row, its scales', and the stride of scales."""


def live_rows(
    view: torch.Tensor, spec: Any, name: str, ids: torch.Tensor, tokens: int
) -> torch.Tensor:
    """What a layer's cache holds of a request: bytes `[entry, ...]`, each with its scales, as its
    kernels find them in vLLM's view `[block, 1, entry, byte]`.
    """
    entries, first, stop = view.shape[2], 0, tokens // spec.tokens_per_state
    if name.endswith("state_cache"):
        ratio = {8: 4, 128: 128}[spec.sliding_window]
        first = max(0, tokens // ratio * ratio - spec.sliding_window + ratio)
    elif "swa" in name:
        first = max(0, tokens - spec.sliding_window + 1)
    numbers = torch.arange(first, stop)
    block, slot = ids[numbers // entries], numbers[:, None] % entries
    if view.dtype != torch.uint8:
        return view[block, 0, slot[:, 0]].clone().view(torch.uint8)
    size, scale, step = RECORDS[view.shape[3]]
    pages = view[:, 0].flatten(1)
    columns = slot * size + torch.arange(size), entries * size + slot * step + torch.arange(scale)
    return pages[block[:, None], torch.cat(columns, 1)]


class Launched:
    """A kernel that is called as Triton's are: `kernel[grid](...)`."""

    def __init__(self, run: Callable[..., None]) -> None:
        self.run = run

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *arguments, num_warps: self.run(*arguments)


def requests_of_tokens(
    starts: torch.Tensor, out: torch.Tensor, requests: int, mapped: int, tokens: int
) -> None:
    """The request of each token of a batch, 0 of those behind `mapped`."""
    token = torch.arange(tokens, dtype=starts.dtype)
    request = (torch.searchsorted(starts, token, right=True) - 1).clamp(max=requests - 1)
    out[:tokens] = torch.where(token < mapped, request, 0)


def compressed_slots(
    out: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor,
    table: torch.Tensor, states: int, ratio: int, *_: int,
) -> None:  # fmt: skip
    """Where the last token of each `ratio` writes their state; -1 of others."""
    for request, (first, stop) in enumerate(zip(starts.tolist(), starts.tolist()[1:])):
        position = torch.arange(int(lengths[request]) - stop + first, int(lengths[request]))
        entry = position // ratio
        slot = table[request, entry // states].long() * states + entry % states
        ends = ((position + 1) % ratio == 0) & (slots[first:stop] != -1)
        out[first:stop] = torch.where(ends, slot, -1)


def enable() -> None:
    """In a process that has not begun a step."""
    from vllm.models.deepseek_v4.cpu import cpu_mla
    from vllm.v1.attention.backends.mla import compressor_utils, indexer, sparse_swa
    from vllm.v1.attention.ops import metadata

    def unread(*_: Any, **__: Any) -> None:
        pass

    def no_schedule(*_: Any) -> dict[str, None]:
        return dict.fromkeys(("swaonly", "c4a", "c128a", "c1a", "c2a"))

    metadata._token_request_mapping_kernel = Launched(requests_of_tokens)
    compressor_utils._COMPRESSED_SLOT_MAPPING_KERNEL = compressed_slots
    sparse_swa._COMPUTE_SWA_INDICES_AND_LENS_KERNEL = unread
    sparse_swa._COMPUTE_PREFILL_METADATA_KERNEL = unread
    indexer._PREPARE_UNIFORM_DECODE_KERNEL = unread
    indexer._BUILD_PREFILL_CHUNK_METADATA_KERNEL = unread
    cpu_mla.DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler = no_schedule
