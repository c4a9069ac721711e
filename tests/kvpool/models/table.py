"""docs/models.md: every causal-LM type of transformers, and what its pool keeps.

Written by `python -m tests.kvpool.models.table > docs/models.md`.
"""

from __future__ import annotations

from collections.abc import Iterable

import transformers

from kvpool import IndexKey
from kvpool.models import REFUSED, declare
from kvpool.models.families import DRAFTS
from tests.kvpool.models.configs import FEW
from tests.kvpool.models.tiny import TEXTS, TYPES, changes

# not run: their models need an image, or a package for images
AS_TEXT = ("dots3_note", "gemma3n", "gemma4", "gemma4_unified")
HEAD = """# Models

The model types of transformers for which kvpool can build a pool.

transformers {version} registers {total} types as causal language models.
`kvpool.models.declare(config)` accepts {declared} of them. [Why not](#why-not) has the reason for
each of the others, which is also what `declare` raises. `kvpool.models.known()` lists all that it
accepts, with those of multimodal models; `kvpool budget CONFIG --memory 80GiB` prints the sizes for a model of yours.

Each type was tested with a tiny random model in float32 over `PoolCache` and over transformers' own
cache, with the prompt in one piece and in chunks: logits are bit-equal, and the pool keeps as many
elements of each layer as the tensors of that cache (`tests/kvpool/models` with `--long`).
Only the text types were run of {as_text}: these need an image or an image package.

`python -m tests.kvpool.models.table > docs/models.md` writes this page, and a test fails if it
differs from the installed transformers.

## How a config is read

A config is translated into one description per layer: the kinds of state that the layer keeps, each
with or without a window. The pool is a `LayeredPool` of these states, or a `DSv4Pool`.

| field | rule |
|---|---|
| `layer_types`, `layers_block_type` | the type of each layer; entries of draft layers may follow. Without them, the rule of the model type applies. A config with neither is refused: use transformers' `config.to_dict()`, which contains the list |
| `sliding_window` | includes the current token, so the pool's window is one token less |
| `attention_chunk_size` | a sliding window of that size |
| `num_key_value_heads`, `head_dim` | default to `num_attention_heads` and `hidden_size / num_attention_heads`. Required if transformers has another default for the type, except for `gemma3_text` (4 KV heads of 256). If models of the type ignore the field, only the default is accepted |
| `num_kv_shared_layers` | the last layers keep no state, in types that read this field |
| `per_layer_config` | overrides fields of single layers; a layer with `skip` is refused |
| `text_config` | a multimodal config is declared as its text model |
| any other that may concern state (`*head*`, `*window*`, `*kv*`, `*conv*`, `*state*` and others: `STATE` in `kvpool/models/rules.py`) | refused by name, unless it is null, false, 0 or empty |

Falcon with `new_decoder_architecture`: transformers repeats KV heads for every query head before it
caches them, so the pool has one KV head per query head. Serving engines keep `num_kv_heads`.

## Types

What a pool keeps: *tokens*, entries of every token; *window*, entries of a window of tokens;
*request*, state whose size does not depend on the number of tokens (linear states and rings). This
is what the tested config keeps: whether layers have windows depends on yours.
"""  # noqa: E501
COLUMNS = """
| kinds of state | keeps | types |
|---|---|---|
"""
WITHIN = """
## Text models of multimodal models

Types that `AutoModelForCausalLM` does not make: most appear only as the `text_config` of another
type. They were tested in the same way, with hidden states in place of logits.
"""


def main() -> str:
    numbers = {"total": len(TYPES), "declared": sum(name not in REFUSED for name in TYPES)}
    head = HEAD.format(version=transformers.__version__, as_text=_names(AS_TEXT), **numbers)
    reasons: dict[str, list[str]] = {}
    for name, reason in sorted(REFUSED.items()):
        reasons.setdefault(reason, []).append(name)
    end = (
        "\n## Drafts\n\n"
        f"`declare_draft(config)` declares the multi-token prediction layers of {_names(DRAFTS)} "
        "that the config counts (`num_nextn_predict_layers`).\n"
    )
    why = "\n## Why not\n\n| reason | types |\n|---|---|\n"
    why += "".join(f"| {reason} | {_names(names)} |\n" for reason, names in reasons.items())
    return head + _table(TYPES) + WITHIN + _table(TEXTS) + end + why


def _table(names: Iterable[str]) -> str:
    """A row for all types that keep the same kinds in the same way, the most frequent first."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name in names:
        if name not in REFUSED:
            rows.setdefault(_kept(name), []).append(name)
    ordered = sorted(rows.items(), key=lambda row: (-len(row[1]), row[0]))
    return COLUMNS + "".join(
        f"| {kinds} | {keeps} | {_names(types)} |\n" for (kinds, keeps), types in ordered
    )


def _kept(name: str) -> tuple[str, str]:
    """The kinds of a type's states, and whether they grow with tokens."""
    config = transformers.AutoConfig.for_model(name, **({} if name in AS_TEXT else changes(name)))
    declared = declare(config.to_dict())
    index = {"index_packing": "f32"} if IndexKey in declared.kinds else {}
    pool = declared.build(dtype="f32", page_size=declared.page_size, **FEW, **index)
    spaces = [pool.layout.space_by_name[part.space] for part in pool.specs]
    windows = any(not space.grows and not space.per_request for space in spaces)
    kept = {"tokens": any(space.grows for space in spaces), "window": windows}
    kept["request"] = any(space.per_request for space in spaces)
    kinds = sorted(kind.__name__ for kind in declared.kinds)
    return ", ".join(kinds), ", ".join(word for word, there in kept.items() if there)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


if __name__ == "__main__":
    print(main(), end="")
