"""docs/models.md: every causal-LM type of transformers, its pool, and what its tiny model keeps.

Written by `python -m tests.kvpool.models.table > docs/models.md`.
"""

from __future__ import annotations

from collections.abc import Iterable

import transformers

from kvpool import IndexKey
from kvpool.models import REFUSED, Declaration, declare
from kvpool.models.families import DRAFTS
from tests.kvpool.models.configs import FEW
from tests.kvpool.models.tiny import TEXTS, TYPES, changes

# not run: their models need an image, or a package for images
AS_TEXT = ("dots3_note", "gemma3n", "gemma4", "gemma4_unified")
HEAD = """# Models

The model types of transformers for which kvpool can build a pool.

transformers {version} registers {total} types as causal language models.
`kvpool.models.declare(config)` accepts {declared} of them; [Why not](#why-not) gives the reason for
each of the others, as the refusal of `declare` does.
`python -m tests.kvpool.models.table > docs/models.md` writes this page, and a test fails if it
differs from the installed transformers.

Each type is tested with a tiny random model in float32, which runs over `PoolCache` and over
transformers' own cache, with the prompt in one piece and in chunks. The logits are bit-equal, and
the pool keeps as many elements of each layer as the tensors of transformers' cache
(`tests/kvpool/models/test_every_type.py` with `--long`; `deepseek_v4` in
`tests/kvpool/integrations/test_transformers.py`).

The sizes are bytes of the tiny model, over all layers:

- per token: layers that keep every token;
- per token in a window: layers that keep a window of tokens;
- per request: linear states and rings, whose size does not depend on the number of tokens.

## How a config is read

A config is translated into one description per layer: the kinds of state that the layer keeps, each
with or without a window. The pool is a `LayeredPool` of these states, or a `DSv4Pool`.

- `layer_types` or `layers_block_type` lists the type of each layer. Without it, the rule of the
  model type applies (`kvpool/models/families.py`, `latents.py`, `linear.py`). A config with neither
  is refused; transformers' `config.to_dict()` contains the list. Entries of draft layers may
  follow.
- `sliding_window` includes the current token, so the pool's window is one token less.
- `attention_chunk_size` is read as a sliding window of that size: no token attends to more.
- `num_key_value_heads` defaults to `num_attention_heads`, `head_dim` to `hidden_size /
  num_attention_heads`. If transformers has another default for the type, the field is required; for
  `gemma3_text` that default is known (4 KV heads of 256). If models of the type ignore the field, a
  value other than the default is refused.
- `num_kv_shared_layers`: the last layers keep no state, in the types that read this field.
- `per_layer_config` overrides fields of single layers. A layer with `skip` is refused.
- `text_config`: a multimodal config is declared as its text model.
- Any other field that may concern state (`*head*`, `*window*`, `*kv*`, `*conv*`, `*state*` and
  others: `STATE` in `kvpool/models/rules.py`) is refused by name, unless it is null, false, 0 or
  empty.

Falcon with `new_decoder_architecture`: transformers repeats KV heads for every query head before it
caches them, so the declared pool has one KV head per query head. Serving engines keep
`num_kv_heads`.

## Types

"as its text type": the model needs an image or an image package, so only its text type was run.
"""
COLUMNS = """
| type | kinds of state | per token | per token in a window | per request | logits bit-equal |
|---|---|---:|---:|---:|---|
"""
WITHIN = """
## Text models of multimodal models

Types that `AutoModelForCausalLM` does not make: most appear only as the `text_config` of another
type. They are tested in the same way, with hidden states in place of logits.
"""


def main() -> str:
    declared = sum(name not in REFUSED for name in TYPES)
    numbers = {"total": len(TYPES), "declared": declared, "version": transformers.__version__}
    left: dict[str, list[str]] = {}
    for name, why in sorted(REFUSED.items()):
        left.setdefault(why, []).append(f"`{name}`")
    drafts = ", ".join(f"`{name}`" for name in sorted(DRAFTS))
    end = (
        "\n## Drafts\n\n"
        f"`declare_draft(config)` declares the multi-token prediction layers of {drafts}.\n"
    )
    why = "\n## Why not\n\n| reason | types |\n|---|---|\n"
    why += "\n".join(f"| {reason} | {', '.join(names)} |" for reason, names in left.items())
    return HEAD.format(**numbers) + _table(TYPES) + WITHIN + _table(TEXTS) + end + why + "\n"


def _table(names: Iterable[str]) -> str:
    return COLUMNS + "".join(f"{_row(name)}\n" for name in names)


def _row(name: str) -> str:
    if name in REFUSED:
        return f"| `{name}` | | | | | [no](#why-not) |"
    config = transformers.AutoConfig.for_model(name, **({} if name in AS_TEXT else changes(name)))
    if name in AS_TEXT:
        return f"| `{name}` | {_kinds(declare(config.to_dict()))} | | | | as its text type |"
    declared = declare(config.to_dict())
    index = {"index_packing": "f32"} if IndexKey in declared.kinds else {}
    pool = declared.build(dtype="f32", page_size=declared.page_size, **FEW, **index)
    windows = once = 0
    for part in pool.specs:
        space = pool.layout.space_by_name[part.space]
        if space.per_request:
            once += part.item_bytes * len(part.layers)
        elif not space.grows:
            windows += part.item_bytes * len(part.layers) // space.entries_per_item
    token = f"{pool.bytes_per_token:,g}"
    return f"| `{name}` | {_kinds(declared)} | {token} | {windows:,} | {once:,} | yes |"


def _kinds(declared: Declaration) -> str:
    return ", ".join(sorted(kind.__name__ for kind in declared.kinds))


if __name__ == "__main__":
    print(main(), end="")
