"""Hostile bytes and hostile peers, a few hundred inputs a target, and inputs that once did harm.

`python -m tests.fuzz` runs the same targets with millions.
"""

from __future__ import annotations

import itertools
import time
import tracemalloc
from dataclasses import replace

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from disagg.engines.base import TransferError
from disagg.engines.local import LocalEngine
from disagg.plan import plan
from disagg.protocol import codec, messages
from disagg.protocol.events import Received
from disagg.protocol.peers.prefill_peers import MAX_PEERS
from disagg.protocol.prefill import MAX_REQUESTED, PrefillMachine
from disagg.protocol.verification import Verification, differences
from kvpool.layout import LayoutError, PoolLayout
from tests.disagg.protocol.pair import Pair, asks
from tests.fuzz import build, machines, planning, samples, wide
from tests.fuzz.guard import guarded
from tests.fuzz.targets import TARGETS

MOST = 1 << 16
KEPT = 24 << 20
DOCUMENTS = [name for name, target in TARGETS.items() if target.mutate]
KINDS = build.message_types()
HELLO = machines.hello(samples.LAYOUTS[0], "d")


@pytest.mark.parametrize("name", DOCUMENTS)
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(which=st.integers(0, 1 << 16), source=st.randoms(use_true_random=False))
def test_hostile_bytes_are_read_or_refused_at_little_cost(name, which, source):
    target, seeds = TARGETS[name], SEEDS[name]
    data = target.mutate(seeds[which % len(seeds)], source, MOST)
    guarded(lambda: target.run(data), len(data))


@pytest.mark.parametrize("machine", [machines.prefill, machines.decode], ids=["prefill", "decode"])
@settings(max_examples=100)
@given(seed=st.integers(0, 1 << 32))
def test_an_endpoint_survives_whatever_a_peer_sends(machine, seed):
    guarded(lambda: machine(build.Seeded(seed)), MOST)


SEEDS = {name: list(TARGETS[name].seeds()) for name in DOCUMENTS}


# memory kept of hostile peers is bounded


def flood(pairs):
    """Prefill's machine after messages by peer, during which it never kept more than `KEPT`."""
    machine = PrefillMachine(machines.hello(samples.LAYOUTS[0], "g1"), samples.LAYOUTS[0], now=0.0)
    tracemalloc.start()
    try:
        for peer, message in pairs:
            machine.handle(Received(peer, message), 0.0)
        assert tracemalloc.get_traced_memory()[1] < KEPT
    finally:
        tracemalloc.stop()
    return machine


def request(room, attempt="a"):
    return asks(generation="g1", room=room, attempt=attempt, num_tokens=5)


def test_twenty_thousand_hellos_leave_no_more_peers_than_allowed():
    rooms = flood((b"%d" % number, HELLO) for number in range(20_000))
    assert len(rooms.peers.alive) == MAX_PEERS


def test_a_peer_opens_no_more_rooms_than_allowed():
    rooms = flood([(b"a", HELLO), *((b"a", request(n)) for n in range(MAX_REQUESTED + 5000))])
    assert len(rooms.rooms.open) == MAX_REQUESTED


# layouts that did harm


def layout(sizes, regions):
    """An encoded layout: item bytes by buffer; buffer, offset, axes and width by region."""
    buffers = [wide.buffer(n, 0, size, size, 1, memory="meta") for n, size in enumerate(sizes)]
    rows = []
    for layer, (place, offset, axes, width) in enumerate(regions):
        steps = [{"name": "head", "size": n, "stride": step} for n, step in axes]
        rows.append(wide.region(layer, place, offset, width, axes=steps))
    return build.packed(wide.whole(buffers, rows))


@pytest.mark.parametrize("runs", [(1 << 18) + 1, 1 << 22, 1 << 40])
def test_a_small_layout_of_many_runs_is_refused(runs):
    data = layout([2 * runs], [(0, 0, [(runs, 2)], 1)])
    with pytest.raises(LayoutError, match=f"an item of {runs} separate runs, at most 262144"):
        PoolLayout.from_msgpack(data)
    assert guarded(lambda: TARGETS["layout"].run(data), len(data)) == "refused"


def test_the_most_runs_that_a_layout_may_have_fit_the_bounds():
    data = layout([1 << 19], [(0, 0, [(1 << 18, 2)], 1)])
    assert guarded(lambda: TARGETS["layout"].run(data), len(data)) == "read"
    halves = layout(
        [1 << 18, 1 << 18, 2 << 18],
        [
            (0, 0, [(1 << 17, 2)], 1),
            (1, 0, [(1 << 17, 2)], 1),  # the same shape once more costs nothing
            (2, 0, [(1 << 17, 4)], 1),
        ],
    )
    assert guarded(lambda: TARGETS["layout"].run(halves), len(halves)) == "read"


def side_by_side(count, steps=1 << 10):
    """An encoded layout of buffers whose items lie side by side, each of `steps` runs."""
    heads, size = [{"name": "head", "size": steps, "stride": 2}], 2 * steps
    buffers = [wide.buffer(n, size * n, size * count, size, 2, padding=True) for n in range(count)]
    return build.packed(wide.whole(buffers, [wide.region(n, axes=heads) for n in range(count)]))


def test_items_side_by_side_have_no_more_runs_together_than_one_may_have():
    data = side_by_side(1 << 8)
    assert guarded(lambda: TARGETS["layout"].run(data), len(data)) == "read"
    with pytest.raises(LayoutError, match="are 263168 separate runs, at most 262144"):
        PoolLayout.from_msgpack(side_by_side((1 << 8) + 1))


def test_item_shapes_with_colliding_hashes_take_no_longer_than_others():
    pairs, reading, plans = colliding(5000), [], []
    assert len({hash((*pair, ())) for pair in pairs}) == 1
    for more in (0, 1):
        regions = [(n, low, [], high - more * n) for n, (low, high) in enumerate(pairs)]
        data = layout([1 << 62] * len(pairs), regions)
        began = time.thread_time()
        peer = PoolLayout.from_msgpack(data)
        reading.append(time.thread_time() - began)
        began = time.thread_time()
        plan([peer], peer)
        plans.append(time.thread_time() - began)
    assert reading[0] < 4 * reading[1] and plans[0] < 4 * plans[1]


def colliding(count):
    """Pairs for which `(*pair, ())` always has the same hash: CPython's hash is invertible."""
    first, second, start = 11400714785074694791, 14029467366897019727, 2870177450012600261
    inverse = pow(second, -1, 1 << 64)

    def pairs():
        for low in itertools.count(1):
            mixed = (start + low * second) % (1 << 64)
            mixed = (mixed << 31 | mixed >> 33) * first % (1 << 64)
            high = (987654321 - mixed) * inverse % (1 << 64)
            if count < high < (1 << 61) - 1:
                yield low, high

    return list(itertools.islice(pairs(), count))


def test_a_refusal_of_a_long_name_is_short():
    changed = msgspec.msgpack.decode(samples.LAYOUTS[0].to_msgpack())
    for name in ("x" * (1 << 20), "\n" * (1 << 20)):
        changed["model"] = name
        with pytest.raises(LayoutError, match="model: at most 128") as refused:
            PoolLayout.from_msgpack(build.packed(changed))
        assert len(str(refused.value)) < 5000


# messages, plans and metadata that did harm


def test_planning_with_huge_pages_costs_no_more_than_their_padding():
    own = samples.CASES[2].own  # keys and values in one row of 64 bytes
    peer = msgspec.msgpack.decode(samples.heads(4, 1 << 40, 0, 8).to_msgpack())
    for space in peer["spaces"]:
        space["entries_per_item"] = 1 << 34
    for region in peer["regions"]:
        for axis in region["axes"]:
            if axis["name"] == "entry":
                axis["size"] = axis["total"] = 1 << 34
    for number, buffer in enumerate(peer["buffers"]):
        buffer["base"] = (number + 1) << 50
        buffer["item_bytes"] = buffer["item_stride"] = 1 << 40
    data = build.packed([2, [build.packed(peer)], []])
    assert guarded(lambda: planning.run(data), len(data)) == "planned"
    assert planning.plan([PoolLayout.from_msgpack(build.packed(peer))], own).routes


@pytest.mark.parametrize(
    "value",
    [
        b"\x81\x91\x01\xc0",  # a map whose key is a list
        b"\x91" * 12 + b"\xc0",  # nested too deep
    ],
)
def test_an_invalid_aux_value_is_refused(value):
    with pytest.raises(messages.WireError, match="malformed aux"):
        codec.unpack_aux(b"\x81\xa1x" + value)


def test_aux_keys_with_colliding_hashes_are_refused_at_once():
    pairs = colliding(20_000)
    values = b"".join(build.packed([*pair, []]) + b"\xc0" for pair in pairs)
    data = b"\x81\xa1x\xdf" + len(pairs).to_bytes(4, "big") + values
    began = time.thread_time()
    with pytest.raises(messages.WireError):
        codec.unpack_aux(data)
    assert time.thread_time() - began < 1  # it took 7 s


@pytest.mark.parametrize("size", [1, 7, 9])
def test_digests_of_a_wrong_size_fail_the_room(size):
    whole = Verification(room=None, rank=None, pieces=[], begun=0.0)
    sizes = replace(whole, own=bytes(8), theirs=bytes(size))
    finer, sentence = differences(sizes, samples.LAYOUTS[0], "rank 0")
    assert finer is None
    assert f"{size} bytes of digests" in sentence


@pytest.mark.parametrize("host", [b"\xa2\xff\xfe", b"\xa0", b"\xc0"])
def test_metadata_that_is_not_text_is_a_transfer_error(host):
    data = b"\x82" + build.packed("host") + host + build.packed("socket") + build.packed(b"/s")
    with pytest.raises(TransferError):
        LocalEngine().connect(data)


def test_reasons_of_a_peer_are_kept_shortened():
    def flooding():
        for number in range(200):
            peer = b"%d" % number
            yield peer, HELLO
            yield peer, request(number, f"{number}")
            long = "y" * (messages.MAX_TEXT - 3) + str(number)
            yield peer, messages.Abort(generation="g1", room=number, attempt="a", reason=long)
            yield peer, messages.Refuse([long] * 4)

    rooms = flood(flooding())
    assert len(str(rooms.failure(199))) < 5000


def test_many_peers_together_open_no_more_rooms_than_allowed(monkeypatch):
    monkeypatch.setattr("disagg.protocol.prefill.MAX_UNSENT", 5000)

    def flooding():
        for peer in range(4):
            yield b"%d" % peer, HELLO
            for number in range(2000):
                yield b"%d" % peer, request(f"{peer}.{number}")

    assert len(flood(flooding()).rooms.open) == 5000


def test_aux_values_before_the_last_chunk_fail_the_room():
    pair = Pair()
    pair.ask()
    pair.offer(range(16), last=False)
    (ready,) = pair.lose(pair.prefill)
    pair.tell(pair.decode, Received(0, msgspec.structs.replace(ready, aux=b"\x81\xa1x\x07")))
    assert "with the last chunk" in str(pair.decode.failure("r"))
