"""docs/models.md: every causal-LM type of transformers, its pool, and what its tiny model keeps.

Written by `python -m tests.kvpool.models.table > docs/models.md`.
"""

from __future__ import annotations

from collections.abc import Iterable

import transformers

from kvpool.models import declare
from kvpool.models.drafts import DRAFTS
from tests.kvpool.models.tiny import TEXTS, TYPES, changes

CROSS = "keeps an encoder's keys beside its own"
ENCODER = "an encoder; as a decoder it keeps an encoder's keys beside its own"
NOT_DECLARED = {
    **dict.fromkeys(
        (
            *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart"),
            *("mvp", "pegasus", "plbart", "prophetnet", "trocr", "whisper"),
            *("musicgen", "musicgen_melody"),
        ),
        CROSS,
    ),
    **dict.fromkeys(
        (
            *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra"),
            *("ernie", "megatron-bert", "rembert", "roberta", "roberta-prelayernorm"),
            *("roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
        ),
        ENCODER,
    ),
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "a draft that reads its target's keys and keeps none",
    ),
    **dict.fromkeys(
        ("qwen4_exp", "qwen4_exp_text"), "keeps positions of three axes beside its index keys"
    ),
    "blt": "a model of bytes over a model of patches, each with a cache",
    "cpmant": "every forward puts 32 entries of a prompt before the tokens",
    "git": "an image's entries come before the tokens",
    "mllama": "cross-attention layers keep an image's keys",
    "moshi": "a model of audio beside the text model, each with a cache",
    "openai-gpt": "caches nothing",
    "recurrent_gemma": "keeps its recurrent state in the module, not in a cache",
    "reformer": "keeps hidden states in a cache of its own class",
    "rwkv": "keeps its state in a list of its own",
    "xlm": "caches in a dictionary of its own",
    "xlnet": "keeps hidden states, in no cache",
    "xlstm": "keeps its state in a cache of its own class",
}
# not run: their models need an image, or a package for images
AS_TEXT = ("dots3_note", "gemma3n", "gemma4", "gemma4_unified")
HEAD = """# Models

Written by `python -m tests.kvpool.models.table > docs/models.md`; a test fails where it differs
from the installed transformers. The {total} types are those that transformers {version} names as
causal language models; `kvpool.models.declare(config)` takes {declared} of them.

Of each type a tiny random model in float32 ran over `PoolCache`, whole and in chunks, beside
transformers' own cache: its logits are equal to the bit, and the elements that its layers keep were
counted in that cache's tensors (`tests/kvpool/models/test_every_type.py`, all with `--long`). The
bytes are those of the tiny model: of each token, of each token in the windows of all layers, and of
each request. A type whose fields are in `text_config` is read as the type that is named there, also
where its own type is not in this list.

## How a config is read

A config becomes one description a layer (`kvpool/models/layers.py`): the kinds of state that it
keeps, each with a window or none. The pool follows: the class made for such layers, or
`LayeredPool`, which takes any.

- `layer_types` (also `layers_block_type`) says what a layer is. Without it the type's own rule
  counts (`kvpool/models/families.py`, `linear.py`); a type without one is refused, and transformers
  writes the list (`config.to_dict()`).
- `sliding_window` counts the token itself: the pool keeps one token less. `attention_chunk_size`
  alike: of a chunk no more is ever read.
- `num_key_value_heads` left out is `num_attention_heads`, `head_dim` left out is `hidden_size /
  num_attention_heads`. Types for which transformers has another default must give the field; of
  types whose models always have these, another number is refused.
- `per_layer_config` changes fields of single layers. A layer that it skips parts of is refused.
- `num_kv_shared_layers`: the last layers keep nothing, in the types that have it.
- A field that may concern state (`*head*`, `*window*`, `*kv*`, `*conv*`, `*state*` and others:
  `STATE` in `kvpool/models/rules.py`), that no rule reads and that is neither null, false, 0 nor
  empty is refused by its name.
- Falcon's new architecture: transformers repeats KV heads for every head before it caches them, and
  the pool follows; engines keep `num_kv_heads`.
"""
COLUMNS = """
| type | pool | a token | a token in windows | a request | equal to the bit |
|---|---|---:|---:|---:|---|
"""
WITHIN = """
## In multimodal models

Types that are found only as the `text_config` of others, tried in the same way (hidden states in
place of logits). The wrappers are declared by them.
"""


def main() -> str:
    """The document."""
    declared = sum(name not in NOT_DECLARED for name in TYPES)
    numbers = {"total": len(TYPES), "declared": declared, "version": transformers.__version__}
    left = [f"- `{name}`: {why}." for name, why in sorted(NOT_DECLARED.items()) if name in TYPES]
    drafts = ", ".join(f"`{name}`" for name in DRAFTS)
    end = f"\nDrafts (multi-token prediction layers) are declared for {drafts}.\n"
    why = "\n## Why not\n\n" + "\n".join(left)
    return HEAD.format(**numbers) + _table(TYPES) + WITHIN + _table(TEXTS) + end + why + "\n"


def _table(names: Iterable[str]) -> str:
    return COLUMNS + "".join(f"{_row(name)}\n" for name in names)


def _row(name: str) -> str:
    if name in NOT_DECLARED:
        return f"| `{name}` | | | | | [no](#why-not) |"
    config = transformers.AutoConfig.for_model(name, **({} if name in AS_TEXT else changes(name)))
    if name in AS_TEXT:
        return f"| `{name}` | {declare(config.to_dict()).pool.__name__} | | | | as its text type |"
    few = {"num_pages": 2, "num_window_pages": 2, "num_slots": 2, "device": "meta"}
    declared = declare(config.to_dict())
    index = {"index_packing": "f32"} if declared.pool.has_index_packing else {}
    pool = declared.build(dtype="f32", page_size=declared.page_size, **few, **index)
    windows = once = 0
    for part in pool.specs:
        space = pool.layout.space_by_name[part.space]
        if space.per_request:
            once += part.item_bytes * len(part.layers)
        elif not space.grows:
            windows += part.item_bytes * len(part.layers) // space.entries_per_item
    token = f"{pool.bytes_per_token:,g}"
    pool_name = declared.pool.__name__
    return f"| `{name}` | {pool_name} | {token} | {windows:,} | {once:,} | yes |"


if __name__ == "__main__":
    print(main(), end="")
