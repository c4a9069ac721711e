"""What the bytes of an SGLang rank mean beside their layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.runtime_context import get_spec

from disagg.connectors.conventions import conventions
from disagg.protocol.messages import Convention


def engine_conventions(
    model: Any, modules: Sequence[Any], loaded: bool = True
) -> dict[str, Convention]:
    """Of SGLang's model configuration, and of what its indexers write. `loaded`: whether its
    weights are those of its files.
    """
    return conventions(
        model.hf_text_config,
        folder=model.model_path if loaded else None,
        quantization=model.quantization,
        index_keys=index_keys(modules),
        compressor_scores="plain",
    )


def index_keys(modules: Sequence[Any]) -> str | None:
    """Whether indexers turn their keys; None on a stage without any. Those of DSA do, but where a
    fused kernel writes the keys (`Indexer._maybe_rotate`): on CUDA, of models whose indexers have
    interleaved rope (GLM-5).
    """
    indexers = [module for module in modules if hasattr(module, "use_dsa_indexer_fusion")]
    if any(
        indexer.use_dsa_indexer_fusion or indexer.use_aiter_fused_fp8_writer for indexer in indexers
    ):
        return "plain"
    turns = indexers or any(getattr(module, "is_in_indexer", False) for module in modules)
    return "hadamard" if turns else None


def draft_conventions(runner: Any, begins: bool) -> dict[str, Convention]:
    """Those of what drafts, by names that begin with `draft.`. `begins`: with tokens that prefill's
    has proposed; SGLang does not say how many.
    """
    document = engine_conventions(runner.model_config, [*runner.model.modules()])
    if begins:
        spec = get_spec()
        modules = spec.speculative_num_steps if spec.enable_multi_layer_eagle else 1
        document["proposals"] = spec.speculative_eagle_topk * modules
    return {f"draft.{name}": value for name, value in document.items()}
