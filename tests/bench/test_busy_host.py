"""128 MiB in 512 runs between two processes: decode's main thread spins in Python, or steps the
endpoint between pieces of Python work, against the same room while the main thread waits; and
against it while another process spins, which takes a core and not the GIL. Then 32 rooms at once
against one room of as many bytes.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import count

import numpy as np
import pytest
import torch

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint
from disagg.engines.base import create_engine
from kvpool import MHAPool, RequestAddress, Span
from tests.bench.conftest import shuffled
from tests.disagg.engines.peers import ENGINES
from tests.processes import Child

LAYERS, PAGES, PAGE = 4, 64, 64
ROOMS = 32
SHAPE = {"num_kv_heads": 8, "head_dim": 256, "dtype": "bf16", "page_size": PAGE}
"""A page of K or V of one layer is 256 KiB."""
WORK_SECONDS = 0.001
ROUNDS = 15

ways = pytest.mark.parametrize(
    ("engine", "shared"),
    [
        (name, shared)
        for name in ENGINES
        for shared in ((True, False) if name == "local" else (True,))
    ],
    ids=lambda given: given if isinstance(given, str) else "memfd" if given else "private",
)


def pool_of(pages):
    return MHAPool(layers=range(LAYERS), num_pages=2 * pages + 2, **SHAPE)


def last_page(pool, address):
    """Bytes of the last page's last entry."""
    at = PAGE * address.spans["kv"].ids[-1] + PAGE - 1
    return pool.gather("v", LAYERS - 1, [at]).view(torch.uint8).numpy()


def private(layout):
    """The layout over a copy of its memory that no other process can map; and the copy."""
    (slab,) = layout.slabs()
    copy = np.empty(slab.nbytes, dtype=np.uint8)
    torch.frombuffer(copy, dtype=torch.uint8).random_()
    shift = copy.ctypes.data - slab.base
    moved = tuple(replace(buffer, base=buffer.base + shift) for buffer in layout.buffers)
    return replace(layout, buffers=moved), copy


def share(address, number, rooms):
    """The request of room `number` of so many: its part of another's pages."""
    ids = np.array_split(address.spans["kv"].ids, rooms)[number]
    return RequestAddress(ids.size * PAGE, {"kv": Span(ids)})


def serve(pipe, engine, pages, shared):
    """Sends rooms that the pipe names, each its share of the same request."""
    source, address = pool_of(pages), shuffled(pages, 0, PAGE, step=2)
    source._slab.random_()
    layout = source.layout
    if not shared:
        layout, copy = private(layout)
        source._slab.numpy()[:] = copy
    with PrefillEndpoint(layout, create_engine(engine)) as prefill:
        pipe.send((prefill.address, last_page(source, address)))
        while (names := pipe.recv()) is not None:
            for number, name in enumerate(names):
                prefill.send(name, share(address, number, len(names)))
            pipe.send(None)


@pytest.fixture
def rooms(engine, shared, timed):
    """A function that makes a connected decode with some options, and one that hands a request over
    to it in so many rooms; `progress(decode, room)` is what the main thread does until a room has
    ended.
    """
    pages = PAGES if timed else 2
    dest, address, numbers = pool_of(pages), shuffled(pages, 1, PAGE, step=2), count()

    def hand_over(decode, progress, *, rooms=1):
        names = [next(numbers) for _ in range(min(rooms, pages))]
        prefill.ask(*names)
        for number, name in enumerate(names):
            decode.receive(name, share(address, number, len(names)))
        for name in names:
            progress(decode, name)
            assert decode.poll(name) is KVPoll.Success, decode.failure(name)

    def decode_of(**options):
        decode = DecodeEndpoint(dest.layout, create_engine(engine), **options)
        stack.enter_context(decode).connect([url], timeout=60)
        return decode

    with Child(serve, engine, pages, shared) as prefill, ExitStack() as stack:
        url, row = prefill.answer()
        yield decode_of, hand_over
        assert (last_page(dest, address) == row).all()


def wait(decode, room):
    decode.wait(room, 60)


def work(until):
    """Python that never lets the GIL go by itself."""
    number = 0
    while time.perf_counter() < until:
        for _ in range(100):
            number += 1


def spin(decode, room):
    while not decode.poll(room).ended:
        work(time.perf_counter() + WORK_SECONDS)


def step(decode, room):
    while not decode.poll(room).ended:
        decode.step()
        work(time.perf_counter() + WORK_SECONDS)


def spin_for_ever(pipe):
    pipe.send(os.getpid())
    while True:
        pass


@pytest.fixture
def beside_a_process_that_spins():
    """A function that runs another while a process takes a core."""
    with Child(spin_for_ever) as other:
        number = other.answer()
        os.kill(number, signal.SIGSTOP)

        def run(body):
            os.kill(number, signal.SIGCONT)
            try:
                body()
            finally:
                os.kill(number, signal.SIGSTOP)

        yield run


@ways
def test_main_thread_spins(paired, rooms):
    decode_of, hand_over = rooms
    decode = decode_of()
    paired(lambda: hand_over(decode, spin), lambda: hand_over(decode, wait), rounds=ROUNDS)


@ways
def test_another_process_spins(paired, rooms, beside_a_process_that_spins):
    decode_of, hand_over = rooms
    alone = partial(hand_over, decode_of(), wait)
    paired(partial(beside_a_process_that_spins, alone), alone, rounds=ROUNDS)


@ways
def test_main_thread_spins_against_another_process(paired, rooms, beside_a_process_that_spins):
    """What the GIL costs, and not the core."""
    decode_of, hand_over = rooms
    decode = decode_of()
    beside = partial(beside_a_process_that_spins, lambda: hand_over(decode, wait))
    paired(lambda: hand_over(decode, spin), beside, rounds=ROUNDS)


@ways
@pytest.mark.parametrize("progress", [wait, spin], ids=["waits", "spins"])
def test_many_rooms(paired, rooms, progress):
    decode_of, hand_over = rooms
    one = partial(hand_over, decode_of(), progress)
    paired(partial(one, rooms=ROOMS), one, rounds=ROUNDS)


@ways
def test_main_thread_steps(paired, rooms):
    decode_of, hand_over = rooms
    stepped, threaded = decode_of(threaded=False), decode_of()
    paired(lambda: hand_over(stepped, step), lambda: hand_over(threaded, wait), rounds=ROUNDS)
