"""Types of layers: what a config lists, and rules for where it does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvpool.models.config import ALIASES, Fields

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LINEAR, INDEXED = "linear_attention", "indexed_attention"
Types = Callable[[Fields, int], Sequence[str]]
WINDOW = ("sliding_window", *ALIASES["sliding_window"])
PATTERNS = (
    "sliding_window_pattern",
    "_sliding_window_pattern",
    "global_attn_every_n_layers",
    "prefix_dense_sliding_window_pattern",
)
# older names of types
RENAMED = {"attention": FULL, "mamba": LINEAR, "deepseek_sparse_attention": INDEXED}


def types_of(fields: Fields, count: int, names: Sequence[str], default: Types) -> Sequence[str]:
    """The type of each layer, one of `names`: listed, or by the rule `default`."""
    for name in ("layer_types", "layers_block_type"):
        if not fields.has(name):
            continue
        # what the list was made of
        fields.ignore("use_sliding_window", "max_window_layers", *PATTERNS, *WINDOW)
        named = (*names, *(old for old, new in RENAMED.items() if new in names))
        values, length = fields.get(name), count
        if isinstance(values, (list, tuple)) and len(values) > count:
            further = fields.num_draft_layers  # may follow the model's own
            length += further if len(values) == count + further else 0
        types = fields.each(name, named, length)[:count]
        return [RENAMED.get(layer_type, layer_type) for layer_type in types]
    if default is not all_full:
        fields.ignore(*WINDOW)
    return default(fields, count)


def always(kind: str) -> Types:
    """One type for all layers. Where it is full attention, a window is refused as unread."""
    return lambda fields, count: [kind] * count


all_full = always(FULL)


def all_windowed(fields: Fields, count: int) -> Sequence[str]:
    """A window on all layers if there is one."""
    return [SLIDING if fields.has(fields.named("sliding_window")) else FULL] * count


def given_window(fields: Fields, count: int) -> Sequence[str]:
    """As all_windowed, where a type has a window of its own if the field is left out."""
    if not any(name in fields.values for name in WINDOW):
        raise fields.wrong(WINDOW[0], "given, or null where there is no window")
    return all_windowed(fields, count)


def listed(fields: Fields, count: int) -> Sequence[str]:
    """The config must list them."""
    raise fields.wrong("layer_types", f"a list of {count} values, one for each layer")


def every(full: int | None, field: str = "", rest: str = SLIDING, offset: int = 1) -> Types:
    """Full attention on each layer n with (n + offset) % full == 0; `field` overrides `full`, and
    must be given where that is None.
    """

    def types(fields: Fields, count: int) -> Sequence[str]:
        step = fields.whole(field) if full is None else full
        step = fields.whole_or(field, step) if field else step
        return [rest if (n + offset) % step else FULL for n in range(count)]

    return types


def rotated_layers(fields: Fields, count: int) -> Sequence[int]:
    """1 for each layer with rotation: listed, or all but every fourth."""
    if fields.get("no_rope_layers"):
        return fields.each("no_rope_layers", (0, 1), count)
    step = fields.whole_or("no_rope_layer_interval", 4)
    return [int((n + 1) % step != 0) for n in range(count)]


def from_max_window_layers(fields: Fields, count: int) -> Sequence[str]:
    """use_sliding_window is a window on the layers from max_window_layers."""
    used = fields.flag("use_sliding_window")
    first = fields.whole("max_window_layers", 0) if used else count
    fields.ignore("max_window_layers")
    return [FULL if n < first else SLIDING for n in range(count)]


def qwen3_moe(fields: Fields, count: int) -> Sequence[str]:
    """transformers windows all layers."""
    used = fields.flag("use_sliding_window")
    if fields.has("max_window_layers") and fields.whole("max_window_layers", 0) and used:
        raise ValueError(
            f"{fields.model} config: engines disagree on max_window_layers with "
            "use_sliding_window. Give layer_types instead."
        )
    return [SLIDING if used else FULL] * count


def qwen2_moe(fields: Fields, count: int) -> Sequence[str]:
    """A window on every second layer before max_window_layers."""
    end = fields.whole("max_window_layers", 0) if fields.flag("use_sliding_window") else 0
    fields.ignore("max_window_layers")
    return [SLIDING if n < end and n % 2 == 0 else FULL for n in range(count)]


def by_window(fields: Fields, count: int) -> Sequence[str]:
    """A window on the layers from max_window_layers, if there is a window."""
    if not fields.has("sliding_window"):
        return [FULL] * count
    first = fields.whole("max_window_layers", 0)
    return [FULL if n < first else SLIDING for n in range(count)]


def smollm3(fields: Fields, count: int) -> Sequence[str]:
    """A window on layers without rotation."""
    fields.ignore("max_window_layers")
    if not fields.flag("use_sliding_window") or not fields.has("sliding_window"):
        return [FULL] * count
    return [FULL if rotated else SLIDING for rotated in rotated_layers(fields, count)]


def llama4(fields: Fields, count: int) -> Sequence[str]:
    """Chunks on layers with rotation."""
    return [CHUNKED if rotated else FULL for rotated in rotated_layers(fields, count)]


def exaone(fields: Fields, count: int) -> Sequence[str]:
    """Full attention on every fourth layer."""
    if FULL in given_window(fields, count):
        return [FULL] * count
    return every(4, "sliding_window_pattern")(fields, count)


def last_full(types: Types) -> Types:
    return lambda fields, count: [*types(fields, count)[:-1], FULL]


def flint(fields: Fields, count: int) -> Sequence[str]:
    """Full attention on the first two, on every fourth and on the last layer."""
    full = {0, 1, count - 1}
    return [FULL if n in full or n % 4 == 1 else SLIDING for n in range(count)]


def mimo_v2_flash(fields: Fields, count: int) -> Sequence[str]:
    """hybrid_layer_pattern of published configs: 1 is a window."""
    if fields.has("hybrid_layer_pattern"):
        pattern = fields.each("hybrid_layer_pattern", (0, 1), count)
        return [SLIDING if windowed else FULL for windowed in pattern]
    return [FULL if n == 0 or not (n + 1) % 6 else SLIDING for n in range(count)]
