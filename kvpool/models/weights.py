"""Bytes of a model's weights on each rank: read from its files, or estimated from its config."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvpool.models import declare, text_fields
from kvpool.models.checkpoint import Checkpoint, read_checkpoint
from kvpool.models.config import Fields, read_config, shipped, short
from kvpool.models.parameters import (
    RULES,
    NotCounted as NotCounted,
    TypeRules,
    aliases,
    parameters,
)
from kvpool.models.quantised import storage

OTHER_PARTS = re.compile(r"(vision|visual|image|audio|speech)\w*_config")
Source = Literal["given", "read", "estimated", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Bytes of a model's weights by what pipeline stages divide: each layer, the embedding of the
    first stage, which has `others` too, and the head of the last; `draft` are its draft layers.
    `words` say where they are from. `tied`: the last stage has the embedding as its head.

    Where `source` is "given", `embedding` is the bytes of each rank.
    """

    source: Source
    words: str
    layers: tuple[float, ...] = ()
    draft: float = 0
    embedding: float = 0
    head: float = 0
    others: float = 0
    tied: bool = False

    @property
    def total(self) -> int:
        """Without draft layers."""
        return int(sum(self.layers) + self.embedding + self.head + self.others)

    def on_rank(self, layers: Sequence[int], *, tp: int = 1, draft: bool = False) -> int:
        """Bytes on a rank of the stage with `layers`. All are divided evenly over `tp` ranks."""
        if self.source in ("given", "none"):
            return int(self.embedding)
        first, last = 0 in layers, len(self.layers) - 1 in layers
        total = sum(self.layers[layer] for layer in layers)
        total += self.embedding if first or (last and self.tied) else 0
        total += self.others if first else 0
        total += self.head if last else 0
        return -int(-(total + (self.draft if draft else 0)) // tp)


def given(nbytes: int) -> Weights:
    """Bytes of each rank."""
    return Weights(source="given", words="given", embedding=nbytes)


def none(reason: str) -> Weights:
    return Weights(source="none", words=reason)


def weights_of(config: str | Path | Mapping[str, Any]) -> Weights:
    """Weights of a model: those of the safetensors files beside its config, else an estimate.

    Raises NotCounted where neither says it, and ValueError for a broken file.
    """
    fields, _ = text_fields(config)
    count = len(declare(config).layers)
    folder = _folder(config)
    if folder is not None and (files := read_checkpoint(folder)) is not None:
        return _read(files, count)
    return _estimated(fields, read_config(config))


def _folder(config: str | Path | Mapping[str, Any]) -> Path | None:
    """Where the files of a config that is a path would be."""
    if isinstance(config, Mapping) or config in shipped():
        return None
    path = Path(config)
    if path.is_dir():
        return path
    return path.parent if path.name == "config.json" and path.is_file() else None


def _read(files: Checkpoint, count: int) -> Weights:
    """The layers from `count` on are the draft's."""
    if not files.files:  # an index alone has no sizes of tensors
        words = "read from model.safetensors.index.json, the same for each layer"
        return Weights(source="read", words=words, layers=(files.total / count,) * count)
    noun = "file" if files.files == 1 else "files"
    layers, missing = files.layers, [n for n in range(count) if n not in files.layers]
    blocks = len(layers)
    if missing == [*range(blocks, count)] and blocks and count % blocks == 0:
        # a block of the files has several layers that keep state
        part = count // blocks
        layers, missing = {n: layers[n // part] / part for n in range(count)}, []
    if missing:
        raise NotCounted(f"layer {missing[0]} of {count} is not in the safetensors files.")
    draft = sum(size for layer, size in layers.items() if layer >= count)
    return Weights(
        source="read",
        words=f"read from {files.files} safetensors {noun}",
        layers=tuple(layers[layer] for layer in range(count)),
        draft=draft + files.draft,
        embedding=files.embedding,
        head=files.head,
        others=files.others,
        tied=files.tied,
    )


def _estimated(fields: Fields, config: Mapping[str, Any]) -> Weights:
    """Raises NotCounted where a field is missing too."""
    model = config["model_type"]
    if fields.inside or any(OTHER_PARTS.fullmatch(name) and config[name] for name in config):
        raise NotCounted(f"{model} has other parts than its text model.")
    rules = RULES.get(model)
    if rules is None:
        raise NotCounted(f"how many parameters a {model} has is not known.")
    _check(fields, rules)
    try:
        counts, stored = parameters(fields, declare(config), rules), storage(fields)
    except NotCounted:
        raise
    except ValueError as error:
        raise NotCounted(str(error)) from None
    layers = tuple(stored.layer_bytes(layer, n) for n, layer in enumerate(counts.layers))
    first = len(layers)
    draft = (stored.layer_bytes(layer, first + n) for n, layer in enumerate(counts.draft_layers))
    return Weights(
        source="estimated",
        words=f"estimated from the config ({stored.name})",
        layers=layers,
        draft=sum(draft),
        embedding=counts.embedding * stored.plain,
        head=counts.head * stored.plain,
        tied=counts.head == 0,
    )


def _check(fields: Fields, rules: TypeRules) -> None:
    for name in rules["needs"]:
        if not any(fields.has(alias) for alias in aliases(name)):
            raise NotCounted(str(fields.wrong(name, "given")))
    for name, value in rules["fixed"].items():
        if fields.has(name) and fields.get(name) != value:
            raise NotCounted(f"with {name} {short(fields.get(name))} they are not known.")
