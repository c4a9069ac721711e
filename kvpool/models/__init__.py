"""What pool a model needs: from a config.json of the hub's format to a pool's declaration.

`declare("deepseek_v32").build(num_pages=1000, packing="fp8")` is a pool for the model of a shipped
config; the path of a config.json, of its directory, or its fields do as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpool.models.config import Fields, read_config
from kvpool.models.config import shipped as shipped
from kvpool.models.families import DRAFTS, TARGETS, Need
from kvpool.pools.base import KVPool
from kvpool.pools.dsv4 import DSv4Pool

NESTED = ("gemma3",)  # types whose fields lie in text_config
PAGE_SIZE, COMPRESSED_PAGE_SIZE = 64, 256  # every compress ratio must divide a page


@dataclass(frozen=True, slots=True)
class Declaration:
    """A pool class and all its arguments but sizes, dtype, device, shard and stage.

    `layers` are global ids: of a target all layers of the model, of a draft those after them.
    `page_size` is what `build` takes where it is not given.
    """

    pool: type[KVPool]
    arguments: Mapping[str, Any]
    layers: tuple[int, ...]
    total_kv_layers: int
    owner: str
    model: str
    page_size: int

    def build(self, **common: Any) -> KVPool:
        """The pool, of all layers unless `layers` names some. A dtype or a packing must be given,
        and num_pages, num_window_pages and num_slots as far as the pool has such spaces.

        Whatever is given here goes before what is declared.
        """
        return self.pool(**self._given(common))

    def from_budget(self, nbytes: int, **common: Any) -> KVPool:
        """As `build`, of as many pages as fit into `nbytes`; see KVPool.from_budget."""
        return self.pool.from_budget(nbytes, **self._given(common))

    def _given(self, common: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "layers": self.layers,
            "total_kv_layers": self.total_kv_layers,
            "owner": self.owner,
            "model": self.model,
            "page_size": self.page_size,
            **self.arguments,
            **common,
        }


def declare(config: str | Path | Mapping[str, Any]) -> Declaration:
    """The pool that a model needs, of its config: a config.json, a directory that holds one, the
    name of a shipped config, or the fields themselves.

    Raises ValueError naming model type, field and what is expected, where one does not fit, and for
    model types that are not known.
    """
    fields = _fields(config)
    return _declaration(fields, TARGETS[fields.model](fields), range(fields.num_layers), "target")


def declare_draft(config: str | Path | Mapping[str, Any]) -> Declaration | None:
    """The pool of a model's draft layers (multi-token prediction), or None where its config names
    none. With the target's page size the two share ids, so their layouts merge.
    """
    fields = _fields(config)
    count, first = fields.num_draft_layers, fields.num_layers
    if count == 0:
        return None
    if fields.model not in DRAFTS:
        raise ValueError(
            f"{fields.model} config: it names {count} draft layers, but how drafts of this type "
            f"attend is not known (known: {', '.join(DRAFTS)}). Build their pool by hand, with "
            "owner='draft'."
        )
    layers = range(first, first + count)
    return _declaration(fields, DRAFTS[fields.model](fields, layers), layers, "draft")


def known() -> tuple[str, ...]:
    """Model types that can be declared."""
    return tuple(sorted(TARGETS))


def _fields(config: str | Path | Mapping[str, Any]) -> Fields:
    values = read_config(config)
    model = values.get("model_type")
    if not isinstance(model, str) or model not in TARGETS:
        raise ValueError(
            f"model_type {model!r}: known are {', '.join(known())}. Declare another by hand: build "
            "MHAPool, MLAPool, NSAPool, SWAPool, HybridLinearPool or DSv4Pool with its heads, dims "
            "and layers, or subclass KVPool and define declare() (docs/add-a-pool.md)."
        )
    fields = Fields(values, model)
    return fields.inner("text_config") if model in NESTED else fields


def _declaration(fields: Fields, need: Need, layers: range, owner: str) -> Declaration:
    pool, arguments = need
    page_size = COMPRESSED_PAGE_SIZE if pool is DSv4Pool else PAGE_SIZE
    total, model = fields.num_layers, fields.model
    return Declaration(pool, arguments, tuple(layers), total, owner, model, page_size)
