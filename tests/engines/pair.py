"""Two engines of a test, prefill and decode, and what oracles in them have saved of each room,
compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

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


def compare(
    folder: Path,
    last: int | None = None,
    converted: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[int, int, list[str]]:
    """Tensors compared, bytes, and what differs, between both sides of every room.

    A rank's file `{side}.{room}.{rank}.pt` has tensors by `name/part`, positions first, then what
    ranks share, heads or channels, but of a row (`row`, `swa_cache row`); a name has its layer's
    number, which is all that two engines' names share. `last`: where one side holds more positions
    than these, its last ones are compared. `converted`: what decode makes of prefill's.
    """
    tensors, nbytes, wrong = 0, 0, []
    for path in sorted(folder.glob("decode.*.0.pt")):
        room = path.name.removeprefix("decode.").removesuffix(".0.pt")
        ours, theirs = (_ranks(folder, side, room) for side in ("decode", "prefill"))
        if not ours or ours.keys() != theirs.keys():
            wrong.append(f"{room}: {sorted(ours)} and {sorted(theirs)}")
        for key in ours.keys() & theirs.keys():
            one, other = ours[key], theirs[key]
            if converted is not None:
                other = converted(other)
            if last is not None and len(one) != len(other):
                one, other = one[-last:], other[-last:]
            tensors += 1
            nbytes += one.numel() * one.element_size()
            same = one.shape == other.shape and one.dtype == other.dtype
            if not same or not torch.equal(_bytes(one), _bytes(other)) or not one.any():
                wrong.append(f"{room} {key} {tuple(one.shape)} {tuple(other.shape)}")
    return tensors, nbytes, wrong


def saved(tensors: dict[str, torch.Tensor], folder: Path, name: str) -> None:
    """Saves what a rank holds of a room as `{name}.pt`, whole or not at all: another process waits
    for it.
    """
    part = folder / f"{name}.part"
    torch.save(tensors, part)
    part.rename(folder / f"{name}.pt")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _ranks(folder: Path, side: str, room: str) -> dict[str, torch.Tensor]:
    """By layer and part, what the ranks hold side by side."""
    ranks = [torch.load(path) for path in sorted(folder.glob(f"{side}.{room}.?.pt"))]
    joined = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        layer, _, part = name.rpartition("/")
        (number,) = (each for each in layer.split(".") if each.isdecimal())
        owner = "draft " if layer.startswith(("draft_model.", "mtp.")) else ""
        held = [rank[name] for rank in ranks if name in rank]
        joined[f"{owner}{number}/{part}"] = held[0] if part.endswith("row") else torch.cat(held, 1)
    return joined
