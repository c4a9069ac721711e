"""Bytes of a checkpoint's tensors, from the headers of its safetensors files."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvpool.models.config import json_object, short

INDEX = "model.safetensors.index.json"
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
# of tensors outside of layers, the first that fits
PARTS = {
    "draft": r"(^|\.)(mtp|nextn)",
    "others": "vis|audio|image|projector",
    "head": r"(^|\.)(lm_head|output|embed_out)\.",
    "norm": r"(^|[._])(norm|ln)(_f)?\.",
    "embedding": r"embed|(^|\.)w[tp]e\.",
    "rest": "",
}
MAX_HEADER = 100_000_000  # bytes; safetensors' own limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Bytes of each layer, of the embedding, of the head with the last norm, of draft layers with
    a list of their own, and of `others`: vision towers, projections. `files` were read: without
    them, an index has only `total`. `tied`: the head is the embedding.
    """

    files: int
    total: int
    layers: Mapping[int, float] = field(default_factory=dict)
    embedding: int = 0
    head: int = 0
    draft: int = 0
    others: int = 0
    tied: bool = False


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """The checkpoint in a folder, None where there is none. Raises ValueError for a broken file."""
    index = folder / INDEX
    paths = sorted(folder.glob("*.safetensors"))
    if index.is_file():
        values = json_object(str(index), index.read_bytes())
        names = {str(name) for name in _inner(index, values, "weight_map").values()}
        if names and not names <= {path.name for path in paths}:
            return _indexed(index, values)
        paths = [path for path in paths if path.name in names]
    # Mistral's checkpoints are there twice, in a format of its own too
    paths = [path for path in paths if not path.name.startswith("consolidated")] or paths
    if not paths:
        return None
    sizes: dict[str, int] = {}
    for path in paths:
        sizes.update(tensor_sizes(path))
    return _sorted(sizes, len(paths))


def _indexed(path: Path, values: Mapping[str, Any]) -> Checkpoint:
    total = _inner(path, values, "metadata").get("total_size")
    # true is an int, and no number of bytes
    if isinstance(total, bool) or not isinstance(total, (int, float)) or not 1 <= total < 1 << 63:
        raise ValueError(f"{path}: no metadata.total_size, and not all of its files are there.")
    return Checkpoint(files=0, total=int(total))


def _inner(path: Path, values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object inside an index, empty where it is left out."""
    inner = values.get(name, {})
    if not isinstance(inner, dict):
        raise ValueError(f"{path}: {name} must be an object, got {short(inner)}.")
    return inner


def _sorted(sizes: Mapping[str, int], files: int) -> Checkpoint:
    """Tensors by what they belong to. The model's own layers are the list with the most bytes."""
    lists: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    parts: dict[str, int] = defaultdict(int)
    for name, size in sizes.items():
        if match := LAYER.search(name):
            lists[name[: match.start()]][int(match[1])] += size
        else:
            parts[next(part for part, words in PARTS.items() if re.search(words, name))] += size
    own = max(lists, key=lambda prefix: sum(lists[prefix].values()), default="")
    for prefix, layers in lists.items():
        if prefix != own:
            part = "draft" if re.search(PARTS["draft"], prefix) else "others"
            parts[part] += sum(layers.values())
    return Checkpoint(
        files=files,
        total=sum(sizes.values()),
        layers=dict(lists.get(own, {})),
        embedding=parts["embedding"],
        head=parts["head"] + parts["norm"],
        draft=parts["draft"],
        others=parts["others"] + parts["rest"],
        tied=not parts["head"],
    )


def tensor_sizes(path: Path) -> Iterator[tuple[str, int]]:
    """Bytes of each tensor of a file: the length of its header in 8 bytes, and the header."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length <= MAX_HEADER else b""
    if not header or len(header) != length:
        raise ValueError(f"{path}: not a safetensors file: its header has {length:,} bytes.")
    for name, tensor in json_object(str(path), header).items():
        if name == "__metadata__":
            continue
        try:
            first, end = tensor["data_offsets"]
            yield name, int(end) - int(first)
        except (TypeError, KeyError, ValueError):
            raise ValueError(f"{path}: tensor {name!r} has no data_offsets.") from None
