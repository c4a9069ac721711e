"""Two engines of a test, prefill and decode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LENGTHS = (300, 77, 16, 513)
"""Of the prompts that most tests hand over."""
EXACT = {"dtype": "float32"}
"""bfloat16 sums are rounded otherwise on two ranks than on one, and in other batches."""


@dataclass(frozen=True)
class Pair:
    """What each side is started with."""

    model: str
    engine: str = "local"
    prefill: dict[str, Any] = field(default_factory=dict)
    decode: dict[str, Any] = field(default_factory=dict)
    both: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def start(self, start: Callable[..., Any], watch: Path) -> tuple[Any, Any]:
        """Both engines, watched in a folder."""
        extra = {"engine": self.engine, **self.extra}
        common = {"extra": extra, "watch": watch, **self.both}
        prefill = start("prefill", self.model, **common, **self.prefill)
        decode = start("decode", self.model, **common, **self.decode)
        return prefill.ready(), decode.ready()
