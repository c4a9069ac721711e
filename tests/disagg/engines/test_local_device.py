"""Device memory over engine local: shared, mapped, copied by its device, and refused by name."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint
from disagg.digest.digest import digests, pieces
from disagg.engines.base import TransferError, create_engine
from disagg.plan import plan
from kvpool.device import get_device
from kvpool.layout import Slab
from tests import oracle
from tests.disagg.engines.local_peers import FakePeer, offer
from tests.disagg.engines.owners import batch_of, memory_of, pattern, read
from tests.disagg.engines.shared_device import installed, there
from tests.pools import CLASSES, mla
from tests.processes import Child, forked

TOKENS = 21
SIZE = 1 << 18


def owner(pipe):
    """A process with memory of the device and of the host."""
    with installed():
        device, engine = get_device("shm:0"), create_engine("local")
        memories = [device.allocate(SIZE).numpy(), memory_of("shared", SIZE)]
        for memory, name in zip(memories, ("shm:0", "cpu")):
            memory[:] = pattern(SIZE) if name == "cpu" else ~pattern(SIZE)
            engine.register([Slab(memory.ctypes.data, SIZE, name)])
        pipe.send((engine.metadata(), [memory.ctypes.data for memory in memories]))
        pipe.recv()
        engine.close()


@pytest.fixture(scope="module")
def other():
    """Metadata of another process, and pointers to its device memory and host memory."""
    with Child(owner) as child:
        yield child.answer()
        assert child.close() == 0


@pytest.fixture
def here():
    """The device, its memory, and an engine that reads into it."""
    with installed():
        device, engine = get_device("shm:1"), create_engine("local")
        memory = device.allocate(SIZE).numpy()
        engine.register([Slab(memory.ctypes.data, SIZE, "shm:1")])
        yield device, memory, engine
        engine.close()


def test_one_read_moves_device_memory_and_host_memory(other, here):
    (metadata, bases), (_, memory, engine) = other, here
    own = memory_of("shared", SIZE)
    to = memory.ctypes.data
    peer = engine.connect(metadata)
    runs = [
        (bases[0] + 7, to + 64, 100),
        (bases[1] + 9, own.ctypes.data + 512, 50),
        (bases[0], to + 1024, 8),
    ]
    read(engine, peer, batch_of(*runs))
    truth = pattern(SIZE)
    expected = np.zeros((2, SIZE), dtype=np.uint8)
    expected[0, 64:164], expected[0, 1024:1032] = ~truth[7:107], ~truth[:8]
    expected[1, 512:562] = truth[9:59]
    assert np.array_equal([memory, own], expected)


def test_memory_of_the_same_process_is_not_mapped(here):
    device, memory, engine = here
    source, other = device.allocate(SIZE).numpy(), create_engine("local")
    source[:] = pattern(SIZE)
    slab = Slab(source.ctypes.data, SIZE, "shm:1")
    other.register([slab])
    metadata = other.metadata()
    read(engine, engine.connect(metadata), batch_of((slab.base + 3, memory.ctypes.data, 64)))
    assert np.array_equal(memory[:64], pattern(SIZE)[3:67]) and not device.attached
    other.close()
    with pytest.raises(TransferError, match="has ended"):
        engine.connect(metadata)


def test_runs_between_the_host_and_a_device_are_refused(other, here):
    (metadata, bases), (_, memory, engine) = other, here
    own = memory_of("shared", 64)
    peer = engine.connect(metadata)
    for src, dst in ((bases[0], own.ctypes.data), (bases[1], memory.ctypes.data)):
        with pytest.raises(TransferError, match="between host memory and shm:1"):
            read(engine, peer, batch_of((src, dst, 64)))
    assert not memory.any() and not own.any()


def test_a_fence_is_true_once_the_device_has_copied_and_unmaps(other, here):
    (metadata, bases), (device, memory, engine) = other, here
    peer = engine.connect(metadata)
    with device.held:
        transfer = engine.read(peer, batch_of((bases[0], memory.ctypes.data, 64)))
        assert not engine.poll(transfer)
        assert not engine.fence(peer, 0.01)
        assert not memory.any() and not device.attached[-1].closed
    assert engine.fence(peer)
    assert engine.poll(transfer) and device.attached[-1].closed
    assert np.array_equal(memory[:64], ~pattern(SIZE)[:64])
    with pytest.raises(TransferError, match="registered no memory"):
        engine.read(peer, batch_of((bases[0], memory.ctypes.data, 64)))


def test_a_forked_child_that_gives_up_destroys_no_mapping(other):
    with installed():
        device, engine = get_device("shm:1"), create_engine("local")
        memory = device.allocate(SIZE).numpy()
        engine.register([Slab(memory.ctypes.data, SIZE, "shm:1")])
        peer = engine.connect(other[0])
        mapping = weakref.ref(device.attached.pop())

        def give_up():
            nonlocal engine, peer
            engine.abandon()
            engine = peer = None
            gc.collect()
            return mapping() is not None

        with forked(give_up) as (_, kept):
            assert kept == "True"
        engine.close()
        assert mapping() is None or mapping().closed


@pytest.mark.parametrize("memory", ["shm:0", "cpu", ""])
def test_an_engine_with_host_memory_reads_no_device(memory):
    devices = [[1 << 30, SIZE, memory, b"handle"]]
    with (
        FakePeer(offer([], devices)) as peer,
        pytest.raises(
            TransferError, match=rf"memory is on {memory}, this side's on cpu: .* of one kind"
        ),
    ):
        create_engine("local").connect(peer.metadata)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"handle": b"rubbish"}, "peer's memory on shm:0: it cannot be mapped"),
        ({"nbytes": SIZE - 1}, f"{SIZE - 1} bytes, mapped {SIZE}"),
        ({"memory": "cuda:0"}, r"memory is on cuda:0, this side's on shm:1"),
        ({"nbytes": 0}, "malformed offer"),
        ({"base": -1}, "malformed offer"),
    ],
    ids=lambda given: str(given)[:20],
)
def test_a_wrong_offer_of_device_memory_is_refused(here, change, said):
    device, _, engine = here
    source = get_device("shm:0").allocate(SIZE).numpy()
    base = source.ctypes.data
    handle = get_device("shm:0").share(base, SIZE)
    fields = {"base": base, "nbytes": SIZE, "memory": "shm:0", "handle": handle, **change}
    with (
        FakePeer(offer([], [list(fields.values())])) as peer,
        pytest.raises(TransferError, match=said),
    ):
        engine.connect(peer.metadata)
    assert all(mapping.closed for mapping in device.attached)


def test_memory_that_a_device_cannot_share_is_refused_by_name(here):
    _, memory, engine = here
    where = memory.ctypes.data
    for slab, said in (
        (Slab(where + 64, 64, "shm:1"), "on shm:1: that is not where an allocation begins"),
        (Slab(where, 64, "shm:0"), "on shm:0, others on shm:1: an engine serves one memory"),
    ):
        with pytest.raises(TransferError, match=said):
            engine.register([slab])
    with pytest.raises(TransferError, match="there is no shm:7"):
        create_engine("local").register([Slab(where, 64, "shm:7")])


def test_a_device_that_cannot_share_is_refused_by_name():
    with pytest.raises(TransferError, match="'meta' cannot share memory between processes"):
        create_engine("local").register([Slab(1 << 20, 64, "meta")])


# digests of device memory


@pytest.mark.parametrize("name", CLASSES)
def test_digests_of_device_memory_equal_those_of_the_host(name):
    pool = CLASSES[name].but(num_pages=12, num_window_pages=16)()
    address = oracle.place(pool, TOKENS)
    oracle.fill(pool, address)
    given = pieces(plan([pool.layout], pool.layout), 0, range(TOKENS), TOKENS)
    assert given
    with installed():
        for each in (False, True):
            host, device = (
                [part.tolist() for part in digests(layout, address, given, each)]
                for layout in (pool.layout, there(pool.layout, "shm:0"))
            )
            assert host == device
        oracle.write(pool, address, range(TOKENS), salt=1)
        made = digests(there(pool.layout, "shm:0"), address, given, True)
        assert not {*np.concatenate([*made])} & {*np.concatenate(device)}


def test_a_hand_off_between_devices_is_verified():
    with installed():
        pools = [mla.but(num_pages=12)(device=f"shm:{number}") for number in range(2)]
        source, dest = pools
        layouts = [there(pool.layout, f"shm:{number}") for number, pool in enumerate(pools)]
        given, address = (oracle.place(pool, TOKENS, seed) for seed, pool in enumerate(pools))
        oracle.fill(source, given)
        oracle.blank(dest)
        with (
            PrefillEndpoint(layouts[0], create_engine("local")) as prefill,
            DecodeEndpoint(layouts[1], create_engine("local"), verify="checksum") as decode,
        ):
            decode.connect([prefill.address], timeout=20)
            decode.receive("good", address)
            prefill.send("good", given)
            assert decode.wait("good", 20) is KVPoll.Success, decode.failure("good")
            oracle.assert_holds(dest, address)
            assert decode.metrics("good").verify_seconds > 0
