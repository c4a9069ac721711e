"""Pairs of serving engines to try, from a TOML file: what `kvpool conform` runs."""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvpool.layout.sentences import nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENGINES = "vllm", "sglang"
TRANSPORTS = "local", "nixl", "mooncake"
CONNECTORS = {
    "kvpool": ENGINES,
    "nixl": ("vllm",),
    "mooncake": ("vllm",),
    "lmcache": ("vllm",),
    "sglang-nixl": ("sglang",),
    "sglang-mooncake": ("sglang",),
}
"""Connectors, and the engines that can have each."""


class SuiteError(ValueError):
    """A suite file that cannot be run: the message has the file, the row, the key and its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """The Python that an engine is installed in. `pythonpath` and `python` are absolute."""

    name: str
    python: str
    pythonpath: str
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Settings of a server. `draft` is a model's name or None, `args` are further arguments of the
    engine's command line: names without dashes, and values.
    """

    engine: str
    block_size: int
    tp: int
    pp: int
    dtype: str
    draft: str | None
    method: str | None
    args: Mapping[str, Any]

    def words(self) -> str:
        """`vllm 32 tp2 eagle`: the engine, its block size, and what is not usual."""
        words = [self.engine, str(self.block_size)]
        words += [f"{key}{size}" for key, size in (("tp", self.tp), ("pp", self.pp)) if size > 1]
        words += [word for word in (self.dtype, self.method) if word not in (None, "bfloat16")]
        return " ".join([*words, *(f"{key}={value}" for key, value in self.args.items())])


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A row: a prefill server and a decode server with a connector between them. `transport` is
    the engine of kvpool that moves bytes, `settings` the connector's own configuration, `prompts`
    lengths in tokens.
    """

    name: str
    connector: str
    model: str
    prefill: Side
    decode: Side
    transport: str
    settings: Mapping[str, Any]
    prompts: tuple[int, ...]
    new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """What a file says. A model is a folder, or the command that makes it: an engine's name, the
    arguments of its Python; `{folder}` among them is where models are kept, and the last line that
    it prints is the model's folder.
    """

    engines: Mapping[str, EngineSpec]
    models: Mapping[str, str | tuple[str, ...]]
    pairs: tuple[Pair, ...]

    def digest(self, pair: Pair) -> str:
        """A hash of all settings of a row, with those of its engines and models."""
        names = {pair.model, pair.prefill.draft, pair.decode.draft} - {None}
        settings = {
            "pair": asdict(pair),
            "engines": [asdict(self.engines[side.engine]) for side in (pair.prefill, pair.decode)],
            "models": {name: self.models[name] for name in sorted(filter(None, names))},
        }
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
