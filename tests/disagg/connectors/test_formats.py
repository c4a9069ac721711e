"""The formats find every element where kernels put it (`vllm/kernels.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np
import pytest
import torch

from disagg.connectors import formats
from disagg.connectors.linear_states import LinearShard, states
from disagg.connectors.tensors import (
    LayerTensor,
    UnknownFormat,
    fold_blocks,
    join_nested,
    layout_of,
)
from disagg.plan import plan
from kvpool.item import Seq
from kvpool.layout import PoolLayout, RequestAddress, Space, Span
from kvpool.layout.formats import Heads, fp8_latent_row, index_key_page, latent_row
from kvpool.models import declare
from tests import oracle
from tests.disagg.connectors.vllm import kernels

D, LATENT, ROPE = 16, 32, 8
BF16, F32, I8, U8 = torch.bfloat16, torch.float32, torch.int8, torch.uint8
FP8 = "float8_e4m3fn"


@dataclass(frozen=True)
class Format:
    """A format of heads or of rows, the kernel that writes it, and elements of the tensor a state.
    `part`: of a tensor of so many tokens, and of heads if it has any. `dense`: the kernel takes the
    inside of a block for contiguous, heads outermost.
    """

    part: Callable
    kernel: type
    content: int
    held: torch.dtype = BF16
    model: dict | None = None
    heads: bool = True
    dense: bool = False


def key_values(dtype, held=BF16, value=D):
    row = formats.key_value_row(D, value, dtype)
    part = lambda tokens, heads: formats.head_rows(row, heads)  # noqa: E731
    return Format(part, kernels.KeysAndValues, D + value, held, {"key": D})


def scaled(dtype, held):
    row = formats.key_value_row(D, D, dtype, with_scales=True)
    part = lambda tokens, heads: formats.head_rows(row, heads)  # noqa: E731
    return Format(part, kernels.TokenHeadScales, 2 * D + 8, held, {})


def transposed(dtype, held):
    def part(tokens, heads):
        return formats.head_items(formats.transposed_keys(tokens, D, D, dtype), heads)

    return Format(part, kernels.TransposedKeys, 2 * D, held, {}, dense=True)


def rows(row, kernel, content, held=U8, **model):
    return Format(lambda tokens, _: formats.rows(row), kernel, content, held, model, heads=False)


def index_keys(tokens, _):
    return formats.items(index_key_page(tokens, 128, dtype=FP8, scale="float32"))


LATENT_ROWS = latent_row(LATENT, ROPE, "bfloat16")
MLA = {"kernel": kernels.LatentRows, "content": LATENT + ROPE, "latent": LATENT}
FORMATS = {
    "keys_and_values": key_values("bfloat16"),
    "keys_and_values_e4m3": key_values(FP8, U8),
    "keys_and_values_e5m2": key_values("float8_e5m2", U8),
    "keys_and_values_f32": key_values("float32", F32),
    "int8_scales": scaled("int8", I8),
    "fp8_scales": scaled(FP8, U8),
    "two_sizes": key_values("bfloat16", value=24),
    "transposed": transposed("bfloat16", BF16),
    "transposed_f32": transposed("float32", F32),
    "transposed_fp8": transposed(FP8, U8),
    "latent_rows": rows(LATENT_ROWS, held=BF16, **MLA),
    "latent_rows_fp8": rows(latent_row(LATENT, ROPE, FP8), **MLA),
    "rows_of_656": rows(fp8_latent_row(), kernels.SparseRows, 656),
    "index_keys": Format(index_keys, kernels.IndexKeys, 132, U8, {}, heads=False, dense=True),
}


def attention(form: Format, layer: int, view, ids, shard=range(2), total=2):
    """A layer as a connector describes it, and as the kernel writes it."""
    part = form.part(view.shape[2], Heads(shard.start, len(shard), total))
    name = f"model.layers.{layer}.attn"
    page = LayerTensor(name=name, number=layer, view=view, parts=[part])
    return page, form.kernel(view, layer, ids, shard, **form.model)


@dataclass
class Engine:
    """One rank's layers: layout, memory, and the kernels over it."""

    state: oracle.State
    ranks: list
    ids: list[int]
    tokens: int

    @property
    def layout(self):
        return self.state.layout

    def table(self, tokens: int) -> RequestAddress:
        return RequestAddress(tokens, {"kv": Span(self.ids[: -(-tokens // self.tokens)])})

    def write(self, tokens: int) -> None:
        for rank in self.ranks:
            rank.write(range(tokens))

    def assert_holds(self, tokens: int) -> None:
        for rank in self.ranks:
            rank.assert_holds(range(tokens))


def engine(form: Format, order="LBHNC", tokens=16, shard=range(2), total=2, layers=2, seed=0):
    shape = (7, len(shard) if form.heads else 1, tokens, form.content)
    physical, views = kernels.views(order, layers, shape, form.held)
    ids = np.random.default_rng(seed).permutation(np.arange(1, 7)).tolist()
    pairs = [attention(form, n, view, ids, shard, total) for n, view in enumerate(views)]
    seen = join_nested(page.describe("kv") for page, _ in pairs)
    spaces = (Space("kv", "paged", tokens),)
    layout = PoolLayout(seen.buffers, seen.regions, spaces, layers)
    slab = physical.view(-1).view(torch.uint8).numpy()
    return Engine(oracle.over(layout, slab), [kernel for _, kernel in pairs], ids, tokens)


def orders(form: Format):
    return ["LBHNC", "BLHNC"] if form.dense else list(kernels.ORDERS)


CASES = [(name, order) for name, form in FORMATS.items() for order in orders(form)]


@pytest.mark.parametrize(("name", "order"), CASES)
def test_what_a_kernel_writes_is_found_in_the_regions(name, order):
    made = engine(FORMATS[name], order)
    made.write(40)
    table = made.table(40)
    actual = {key: view.copy() for key, view in made.state.views.items()}
    oracle.blank(made.state, 0)
    oracle.write(made.state, table, range(40))
    for key, view in made.state.views.items():
        assert np.array_equal(actual[key], view), key


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_of_one_size_are_handed_to_blocks_of_another(name):
    form = FORMATS[name]
    first, *_, last = orders(form)
    source, dest = engine(form, first, 16), engine(form, last, 8, seed=1)
    oracle.blank(source.state, oracle.SOURCE)
    oracle.blank(dest.state)
    source.write(43)
    oracle.move([source.state], dest.state, [source.table(43)], dest.table(43))
    dest.assert_holds(43)
    oracle.assert_holds(dest.state, dest.table(43))


@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if f.heads])
def test_two_ranks_heads_are_handed_to_one(name):
    form = FORMATS[name]
    parts = [engine(form, "LBHNC", 16, shard, 4) for shard in (range(2), range(2, 4))]
    dest = engine(form, "LBHNC", 8, range(4), 4, seed=1)
    oracle.blank(dest.state)
    for part in parts:
        part.write(20)
    oracle.move([p.state for p in parts], dest.state, [p.table(20) for p in parts], dest.table(20))
    dest.assert_holds(20)
    oracle.assert_holds(dest.state, dest.table(20))


def test_planes_of_keys_and_of_values_are_found():
    view = torch.zeros(5, 2, 8, 2 * D, dtype=BF16)
    parts = formats.planes(D, "bfloat16", Heads(0, 2, 2))
    seen = LayerTensor(name="a", number=0, view=view, parts=parts).describe("kv")
    layout = PoolLayout(seen.buffers, seen.regions, (Space("kv", "paged", 8),), 1)
    held = oracle.over(layout, view.view(-1).view(torch.uint8).numpy())
    kernels.PlanesOfHeads(view, 0, [3, 1], range(2)).write(range(11))
    actual = view.clone()
    oracle.blank(held, 0)
    oracle.write(held, RequestAddress(11, {"kv": Span([3, 1])}), range(11))
    assert actual.view(torch.uint8).equal(view.view(torch.uint8))


Q, V, HEAD = 2, 4, 8  # heads of the model and their dim
LINEAR = {
    "delta_net": (("conv.q", Q, HEAD), ("conv.k", Q, HEAD), ("conv.v", V, HEAD)),
    "mamba2": (("conv.x", V, HEAD), ("conv.b", 1, 2 * HEAD), ("conv.c", 1, 2 * HEAD)),
    "mamba1": (("conv.x", 16, 1),),
}


def slot_of(kind, rank=0, size=1, dim_first=False, spare=0):
    """One rank's layer 0 of a linear model, 5 blocks with a tail that is not the layer's."""
    held = [
        (role, max(1, count // size), rank * count // size, dim)
        for role, count, dim in LINEAR[kind]
    ]
    channels, taps = sum(count * dim for _, count, _, dim in held), 3 + spare
    conv = (channels, taps) if dim_first else (taps, channels)
    first = held[-1] if kind == "delta_net" else held[0]
    temporal = {
        "delta_net": (V // size, HEAD, 2 * HEAD // 2),
        "mamba2": (V // size, HEAD, 2 * HEAD),
        "mamba1": (16 // size, 2 * HEAD),
    }[kind]
    nbytes = channels * taps * 2 + int(np.prod(temporal)) * 4
    pages = torch.zeros(5, 1, 1, nbytes + 64, dtype=torch.int8)
    view = pages[..., :nbytes]
    heads = range(first[2], first[2] + first[1])
    kernel = kernels.Slots(
        view, 0, [2 + rank], heads, conv=conv, temporal=temporal, dim_first=dim_first,
        sections=held, cell_dims=1 if kind in ("delta_net", "mamba1") else 2,
    )  # fmt: skip
    shard = LinearShard(rank=rank, ranks=size, groups=1, spare=spare, dim_first=dim_first)
    item = Seq(*states(kind, conv, temporal, ("bfloat16", "float32"), shard))
    parts = [formats.items(item)]
    seen = LayerTensor(name="linear", number=0, view=view, parts=parts).describe("state")
    layout = PoolLayout(seen.buffers, seen.regions, (Space("state", "slot"),), 1)
    held_state = oracle.over(layout, pages.view(-1).view(torch.uint8).numpy())
    return held_state, kernel, RequestAddress(1, {"state": Span([2 + rank])})


@pytest.mark.parametrize("spare", [0, 2])
@pytest.mark.parametrize("dim_first", [False, True])
@pytest.mark.parametrize("kind", LINEAR)
def test_linear_state_is_found(kind, dim_first, spare):
    held, kernel, table = slot_of(kind, dim_first=dim_first, spare=spare)
    oracle.write(held, table, range(1))
    kernel.assert_holds(range(1))


@pytest.mark.parametrize("kind", LINEAR)
def test_linear_state_of_two_ranks_is_handed_to_one_that_keeps_its_taps_otherwise(kind):
    parts = [slot_of(kind, rank, 2, dim_first=True) for rank in range(2)]
    held, kernel, table = slot_of(kind, dim_first=False, spare=1)
    oracle.blank(held)
    for _, source, _ in parts:
        source.write(range(1))
    oracle.move([p[0] for p in parts], held, [p[2] for p in parts], table)
    kernel.assert_holds(range(1))
    oracle.assert_holds(held, table)


DELTA_NET = {
    "model_type": "qwen3_next", "num_hidden_layers": 4, "hidden_size": 64, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["linear_attention"] * 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4,
}  # fmt: skip


@pytest.mark.parametrize("key_first", [True, False])
def test_a_state_of_a_delta_net_is_transposed_where_it_must_be(key_first):
    """vLLM says `[head, value, key]`, which is what GPUs have. On a CPU it is `[head, key, value]`,
    as in the pool.
    """
    heads, value, key = temporal = 4, 12, 8
    conv = 3, 2 * 2 * key + heads * value
    sizes = prod(conv), prod(temporal)
    flat = torch.arange(5 * sum(sizes), dtype=F32).view(5, -1)
    shard = LinearShard(key_first=key_first)
    item = Seq(*states("delta_net", conv, temporal, ("float32",) * 2, shard))
    view, parts = flat.view(I8)[:, None, None], [formats.items(item)]
    seen = LayerTensor(name="linear", number=0, view=view, parts=parts).describe("state")
    source = PoolLayout(seen.buffers, seen.regions, (Space("state", "slot"),), 4)
    counts = {"num_pages": 5, "num_slots": 5, "page_size": 4}
    dest = declare(DELTA_NET).build(dtype="float32", layers=[0], **counts)
    tables = [RequestAddress(9, {"state": Span([n]), "kv": Span([1, 2, 3])}) for n in (3, 2)]
    memory = oracle.over(source, flat.view(-1).view(U8).numpy())
    oracle.apply(plan([source], dest.layout).bind(0, *tables), [memory], dest)
    pooled_conv, pooled = dest.get_linear_state(0, [2])
    own_conv, own = flat[3].split(sizes)
    assert pooled_conv[0].equal(own_conv.view(conv).T)
    own = own.view(heads, key, value) if key_first else own.view(temporal).transpose(1, 2)
    assert pooled[0].equal(own)


@pytest.mark.parametrize(
    ("kind", "conv", "temporal", "groups", "words"),
    [
        ("delta_net", (3, 63), (4, 8, 8), 0, ["63 channels", "4 heads of 8"]),
        ("mamba2", (3, 64), (4, 8, 16), 3, ["1 of 3 groups on each of 2 ranks"]),
    ],
)
def test_a_linear_state_that_is_not_known_is_refused(kind, conv, temporal, groups, words):
    with pytest.raises(UnknownFormat) as refused:
        shard = LinearShard(ranks=2, groups=groups)
        states(kind, conv, temporal, ("float32", "float32"), shard)
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    ("name", "order", "content", "words"),
    [
        ("keys_and_values", "LBHNC", 40, ["80 bytes", "64 are known"]),
        ("transposed", "LBNHC", 2 * D, ["are not contiguous"]),
        ("index_keys", "LBHNC", 136, ["2176 bytes", "2112 are known"]),
    ],
)
def test_a_page_of_another_size_or_order_is_refused_by_name(name, order, content, words):
    form = FORMATS[name]
    shape = 3, 2 if form.heads else 1, 16, content
    (view,) = kernels.views(order, 1, shape, form.held)[1]
    page, _ = attention(form, 0, view, [1])
    with pytest.raises(UnknownFormat) as refused:
        page.describe("kv")
    said = str(refused.value)
    assert said.startswith("model.layers.0.attn: its format is not known.")
    assert all(word in said for word in [*words, "Use a cache layout"]), said


@pytest.mark.parametrize("name", ["keys_and_values", "latent_rows", "index_keys"])
@pytest.mark.parametrize("order", ["LBHNC", "LBNHC"])
def test_kernel_blocks_are_one_where_tokens_are_known_and_one_stride_apart(name, order):
    form = FORMATS[name]
    count = 2 if form.heads else 1
    physical, views = kernels.views(order, 2, (6 * 4, count, 16, form.content), form.held)
    ids = [4 * block + n for block in (5, 2) for n in range(4)]
    pairs = [attention(form, n, view, ids) for n, view in enumerate(views)]
    layers, items = fold_blocks([page for page, _ in pairs], 6)
    folds = not form.dense and (order == "LBNHC" or count == 1)
    assert items == (1 if folds else 4)
    seen = join_nested(page.describe("kv") for page in layers)
    layout = PoolLayout(seen.buffers, seen.regions, (Space("kv", "paged", 64 // items),), 2)
    held = oracle.over(layout, physical.view(-1).view(U8).numpy())
    for _, kernel in pairs:
        kernel.write(range(100))
    actual = physical.clone()
    oracle.blank(held, 0)
    oracle.write(held, RequestAddress(100, {"kv": Span([5, 2] if folds else ids)}), range(100))
    assert actual.view(U8).equal(physical.view(U8))


def test_unequal_kernel_blocks_are_refused_by_name():
    form = FORMATS["keys_and_values"]
    views = [torch.zeros(count, 2, 16, 2 * D, dtype=BF16) for count in (6, 12)]
    layers = [attention(form, n, view, [1])[0] for n, view in enumerate(views)]
    with pytest.raises(UnknownFormat, match=r"model\.layers\.1\.attn \(12, 2, 16, 32\)"):
        fold_blocks(layers, 6)


def test_layers_of_one_space_with_other_pages_are_refused_by_name():
    layers = [
        LayerTensor(
            name=name,
            number=n,
            view=torch.zeros(3, 1, tokens, LATENT + ROPE, dtype=BF16),
            parts=[formats.rows(LATENT_ROWS)],
        )
        for n, (name, tokens) in enumerate({"a": 16, "b": 8}.items())
    ]
    spaces = [Space("kv", entries_per_item=tokens) for tokens in (16, 8)]
    layout = layout_of(zip(spaces[:1], layers), 2, "org/model/", Space("swa", window=4))
    assert ([s.name for s in layout.spaces], layout.model) == (["swa", "kv"], "model")
    with pytest.raises(UnknownFormat, match=r"^b: .*entries_per_item=8.*entries_per_item=16"):
        layout_of(zip(spaces, layers), 2, "org/model")
