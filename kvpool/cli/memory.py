"""Memory of a rank and its weights, as options of commands say them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.layout.units import human, parse_memory

if TYPE_CHECKING:
    from kvpool.models.sizing import Figures
    from kvpool.models.weights import Weights

DEVICES = {
    "H200": 143_155 << 20,  # docs/reports/h200-2026-11-27/bench.json
    "H100": int(79.11 * (1 << 30)),  # 80 GB HBM3, in vLLM's issue 27508
    "910B": int(60.96 * (1 << 30)),  # 64 GB, in vllm-ascend's issue 5020
}
"""Bytes that programs get of a device: PyTorch's total, less than the vendor's number."""
NAMES = ", ".join(f"{name} ({human(nbytes)})" for name, nbytes in DEVICES.items())


def memory_of(text: str) -> int:
    """Bytes of a device or a size. Raises ValueError."""
    nbytes = DEVICES.get(text.strip().upper())
    if nbytes is not None:
        return nbytes
    try:
        return parse_memory(text)
    except ValueError as error:
        raise ValueError(f"{error} Or a device: {NAMES}.") from None


def weights_option(config: str, text: str | None) -> Weights:
    """Weights as --weights says: a size of each rank, `none`, or (None) those of the config."""
    from kvpool.models.weights import NotCounted, given, none, weights_of

    if text == "none":
        return none("")
    if text is not None:
        return given(parse_memory(text, "weights"))
    try:
        return weights_of(config)
    except NotCounted as error:
        return none(str(error))


def weights_words(figures: Figures) -> str:
    """Where the weights are from, and what is assumed."""
    weights = figures.weights
    if weights.source == "none":
        reason = f": {weights.words} Give --weights." if weights.words else "."
        return f"weights are not counted{reason}"
    words = f"weights: {human(weights.total)} {weights.words}"
    if weights.source == "given":
        return f"{words} for each rank"
    words += f", an even part on each of {figures.tp} shards" if figures.tp > 1 else ""
    stages = "; the embedding is in the first stage, the head in the last"
    return words + (stages if len(figures.stages) > 1 else "")
