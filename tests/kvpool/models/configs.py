"""Configs of models, and the states that their layers keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvpool import MHA, State
from kvpool.models import declare

CONFIGS = Path(__file__).parents[3] / "kvpool" / "models" / "configs"
FEW = {"num_pages": 2, "num_window_pages": 2, "num_slots": 2, "device": "meta"}
LLAMA = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    """A shipped config with changes; `...` leaves a field out."""
    fields = {**json.loads((CONFIGS / f"{name}.json").read_text()), **changes}
    return {name: value for name, value in fields.items() if value is not ...}


def published(name: str) -> dict[str, Any]:
    """A small config with the fields that published ones of a type have: what differs from LLAMA is
    in published.json. A field may be "left out".
    """
    changes = json.loads(Path(__file__).with_name("published.json").read_text())[name]
    return {name: value for name, value in (LLAMA | changes).items() if value != "left out"}


def kept(config: Any) -> dict[int, tuple[State, ...]]:
    """What each layer of a config keeps."""
    return dict(declare(config).arguments["states"])


def full(kind: Any, layers: int = 4) -> dict[int, tuple[State, ...]]:
    """Layers that keep every token."""
    return {n: (State(kind),) for n in range(layers)}


def windowed(kind: Any, window: int, layers: Any, swa: MHA | None = None, count: int = 4) -> Any:
    """Layers of which some keep a window, of another kind where `swa` is given."""
    states = {n: (State(swa or kind, window),) for n in layers}
    return {n: states.get(n, (State(kind),)) for n in range(count)}
