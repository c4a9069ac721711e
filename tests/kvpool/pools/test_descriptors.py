"""The lists that connectors take agree with the layout and with the memory, for every pool."""

from __future__ import annotations

import pytest

from kvpool import MHA, Shard, StateType
from kvpool.layout.formats import gated_delta_net
from kvpool.pools.access import BufInfos
from tests.pools import PACKED, dsv4, every_class, hybrid, hybrid_mla, hybrid_nsa, nsa, swa

SCALED = ("fp8", "mxfp8")


def buffers_of(pool, layers, role):
    """Buffers of the first role in them, by layer."""
    regions = pool.layout.region_by_key
    return [pool.layout.buffer_of(regions["target", layer, role]) for layer in layers]


def listed(infos, layers, buffers):
    """Whether four lists say where buffers are."""
    assert infos.layer_ids == list(layers)
    assert infos.data_ptrs == [b.base for b in buffers]
    assert infos.data_lens == [b.items * b.item_stride for b in buffers]
    assert infos.item_lens == [b.item_bytes for b in buffers] == [b.item_stride for b in buffers]
    for numbers in infos[-4:]:
        assert all(type(number) is int for number in numbers)


def groups(pool, sizes):
    """Groups of the main list, counted where they are equal."""
    assert pool.kv_buf_group_sizes == sizes
    if len(set(sizes)) == 1:
        assert pool.kv_buf_groups == len(sizes)


def expect(build, packing):
    """By hand: (roles that begin a buffer, layers) of the main cache, then (kind, role, layers,
    sharded steps) of every state component.
    """
    every_layer = [0, 1, 2, 3]
    scales = packing in SCALED

    def kv(layers, prefix=""):
        names = [f"{prefix}k", f"{prefix}v"]
        names += [f"{prefix}k.scale", f"{prefix}v.scale"] if scales else []
        return [(name, layers) for name in names]

    if build.startswith("mha"):
        return kv(every_layer), []
    if build == "mla":
        return [("latent", every_layer)], []
    if build == "nsa":
        return [("latent", every_layer)], [(StateType.DSA, "index_key", [1, 3], 0)]
    if build == "swa":
        window = [("swa.latent", [0, 2])] if packing != "mxfp8" else kv([0, 2], "swa.")
        heads = 2 if packing == "mxfp8" else 0
        return kv([1, 3]), [(StateType.SWA, role, layers, heads) for role, layers in window]
    if build == "hybrid":
        states = [("conv.q", 2 * 3 + 2 * 3 + 4 * 5), ("temporal", 4)]
        return kv([3]), [(StateType.MAMBA, role, [0, 1, 2], steps) for role, steps in states]
    if build == "hybrid mla":
        states = [("conv.q", 3 * 4 * 3), ("temporal", 4)]
        linear = [(StateType.MAMBA, role, [0, 1, 2], steps) for role, steps in states]
        return [("latent", [3])], linear
    if build == "hybrid nsa":
        states = [("conv.x", 4 * 3 + 2 * 5 + 2 * 5), ("temporal", 4)]
        linear = [(StateType.MAMBA, role, [0, 2], steps) for role, steps in states]
        return [("latent", [1, 3])], [(StateType.DSA, "index_key", [3], 0), *linear]
    if build == "layered":
        window = [(StateType.SWA, role, layers, 2) for role, layers in kv([1], "swa.")]
        first, second = (
            (StateType.MAMBA, f"{n}conv.x", [1], s) for n, s in (("", 8), ("linear1.", 4))
        )
        index = StateType.DSA, "index_key", [2], 0
        rest = first, index, (StateType.SWA, "swa.latent", [3], 0), second
        return [*kv([0]), ("latent", [2])], [*window, *rest]
    rings = [("c2.state", [1, 3]), ("c2.index_state", [1, 3]), ("c8.state", [2])]
    main = [("c2.latent", [1, 3]), ("c2.index_key", [1, 3]), ("c8.latent", [2])]
    kinds = [StateType.DSV4_REQUEST_STATE] * 3
    if build == "dsv4, rings of pages":
        kinds[:2] = [StateType.SWA] * 2
    return main, [
        (StateType.SWA, "swa.latent", every_layer, 0),
        *((kind, role, layers, 0) for kind, (role, layers) in zip(kinds, rings)),
    ]


@pytest.mark.parametrize("name", PACKED)
def test_every_kind_of_buffer_is_listed_once_in_order(name):
    pool = PACKED[name]()
    main, states = expect(*name.rsplit(" ", 1))
    infos = pool.get_contiguous_buf_infos()
    layers = [layer for _, held in main for layer in held]
    listed(infos, layers, [b for role, held in main for b in buffers_of(pool, held, role)])
    groups(pool, [len(held) for _, held in main])
    found = pool.get_state_buf_infos()
    assert [component.state_type for component in found] == [kind for kind, *_ in states]
    for component, (_, role, held, steps) in zip(found, states):
        listed(BufInfos(*component[1:5]), held, buffers_of(pool, held, role))
        assert component.dim_per_tensor == [steps] * len(held)
    count = len(infos.data_ptrs) + sum(len(each.data_ptrs) for each in found)
    assert count == len(pool.layout.buffers)
    assert (pool.total_kv_layers, pool.start_layer, pool.end_layer) == (4, 0, 4)


@every_class
@pytest.mark.parametrize("placement", ["page", "block"])
def test_lists_per_layer_are_refused_where_layers_lie_side_by_side(build, placement):
    pool = build(placement=placement, num_pages=40, device="meta")
    says = f"placement='{placement}' the layers of a page lie side by side; .* Read pool.layout"
    with pytest.raises(ValueError, match=says):
        pool.get_contiguous_buf_infos()
    if build(device="meta").get_state_buf_infos():
        with pytest.raises(ValueError, match=says):
            pool.get_state_buf_infos()
    else:
        assert pool.get_state_buf_infos() == []
    if placement == "page":
        assert pool.kv_buf_group_sizes == build(device="meta").kv_buf_group_sizes


@pytest.mark.parametrize(
    ("build", "layers", "main", "states"),
    [
        (nsa, [0, 2], [0, 2], []),
        (swa, [0, 2], [], [[0, 2]]),
        (swa, [1], [1, 1], []),
        (hybrid, [0, 1], [], [[0, 1], [0, 1]]),
        (hybrid, [3], [3, 3], []),
        (hybrid_mla, [1, 3], [3], [[1], [1]]),
        (hybrid_nsa, [0, 1], [1], [[0], [0]]),
        (hybrid_nsa, [1, 3], [1, 3], [[3]]),
        (dsv4, [0], [], [[0]]),
        (dsv4, [2], [2], [[2], [2]]),
        (dsv4, [0, 1], [1, 1], [[0, 1], [1], [1]]),
    ],
)
def test_a_stage_lists_the_layers_that_it_holds(build, layers, main, states):
    pool = build(layers=layers, total_kv_layers=61)
    infos = pool.get_contiguous_buf_infos()
    assert infos.layer_ids == main
    assert [len(column) for column in infos] == [len(main)] * 4
    assert [component.layer_ids for component in pool.get_state_buf_infos()] == states
    assert (pool.start_layer, pool.end_layer) == (layers[0], layers[-1] + 1)
    assert pool.total_kv_layers == 61


def test_kinds_of_state_have_names_of_their_own():
    sglang = {"SWA": "swa", "DSA": "dsa", "MAMBA": "mamba", "DSV4_REQUEST_STATE": "c128_state"}
    assert {kind.name: kind.value for kind in StateType} == sglang
    assert StateType.NSA is StateType("nsa") is StateType("dsa") is StateType.DSA
    assert StateType.DSV4 is StateType("dsv4") is StateType.DSV4_REQUEST_STATE
    with pytest.raises(ValueError, match="'kv' is not a valid StateType"):
        StateType("kv")


def test_main_lists_divide_evenly_or_their_groups_are_asked_for_by_size():
    pool = dsv4()
    assert pool.kv_buf_group_sizes == [2, 2, 1]
    assert sum(pool.kv_buf_group_sizes) == len(pool.get_contiguous_buf_infos().data_ptrs)
    says = r"groups of different sizes, \[2, 2, 1\]. Read kv_buf_group_sizes"
    with pytest.raises(ValueError, match=says):
        _ = pool.kv_buf_groups


def cut(total, rank, size):
    """(start, size) of equal parts, or of replicas where ranks are more than steps."""
    return (rank * total // size, total // size) if size <= total else (rank * total // size, 1)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_convolution_lists_what_each_rank_holds_of_its_sections(size):
    """q and k have 2 heads of 3, v 4 of 5; x has 4 of 3, B and C have 2 of 5."""
    for build, named in (
        (hybrid, (("q", 2, 3), ("k", 2, 3), ("v", 4, 5))),
        (hybrid_nsa, (("x", 4, 3), ("b", 2, 5), ("c", 2, 5))),
    ):
        for rank in range(size):
            pool = build(shard=Shard(rank, size))
            conv, temporal = pool.get_state_buf_infos()[-2:]
            sections = []
            for name, heads, dim in named:
                start, held = cut(heads, rank, size)
                sections.append((f"conv.{name}", start * dim, held * dim, heads * dim))
            assert conv.sections == [sections] * len(conv.layer_ids)
            assert conv.outer_counts == [1] * len(conv.layer_ids)
            channels = pool.get_linear_state(0, [1])[0].shape[1]
            assert sum(section.size for section in conv.sections[0]) == channels
            start, held = cut(4, rank, size)
            assert temporal.sections[0] == [("temporal", start, held, 4)]
            assert temporal.outer_counts[0] == 1


def test_what_an_item_repeats_before_its_sharded_steps_is_counted():
    """Taps before channels, entries before heads; rows of latents have no such steps."""
    taps = hybrid(linear=gated_delta_net(2, 4, 3, 5, 4, "taps_first")).get_state_buf_infos()
    assert [each.outer_counts[0] for each in taps] == [3, 1]
    for order, times in (("nhd", 2), ("hnd", 1)):
        for heads in (1, 4):
            k, _ = swa(swa=MHA(heads, 8, order=order)).get_state_buf_infos()
            assert (k.sections[0], k.outer_counts[0]) == ([("swa.k", 0, heads, heads)], times)
    (rows,) = swa().get_state_buf_infos()
    assert (rows.sections, rows.outer_counts) == ([[], []], [1, 1])


def test_a_draft_is_listed_like_a_target():
    draft = dsv4(owner="draft", own_spaces=True, layers=[3], total_kv_layers=1)
    assert draft.get_contiguous_buf_infos().layer_ids == [3, 3]
    assert [s.state_type for s in draft.get_state_buf_infos()] == [StateType.SWA] + [
        StateType.DSV4_REQUEST_STATE
    ] * 2
    assert draft.total_kv_layers == 1
