"""Memory is touched in the background, and nothing in it changes."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading

import numpy as np
import pytest

from disagg import DecodeEndpoint, create_engine
from disagg.host.prefault import Prefault
from kvpool.layout import Buffer, PoolLayout, Space
from tests.disagg.engines.local_peers import reading
from tests.processes import until

PAGES = 9000
"""35 MiB: more than one chunk."""


def memory_of(pages=PAGES):
    """A memory file that nothing was written to but its third page, and its mapping."""
    handle = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(handle, pages * mmap.PAGESIZE)
    fcntl.fcntl(handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    memory = np.frombuffer(mmap.mmap(handle, pages * mmap.PAGESIZE), dtype=np.uint8)
    memory[2 * mmap.PAGESIZE : 3 * mmap.PAGESIZE] = 7
    return handle, memory


def allocated(handle):
    """Pages of a memory file that are there."""
    return os.fstat(handle).st_blocks * 512 // mmap.PAGESIZE


def quiet():
    """Whether no thread touches memory."""
    return not any(thread.name == "Prefault" for thread in threading.enumerate())


def test_own_memory_is_allocated_and_keeps_its_contents():
    handle, memory = memory_of()
    assert allocated(handle) == 1
    Prefault().own(memory.ctypes.data + 1, memory.nbytes - 1)  # the first page is not all ours
    until(quiet)
    assert allocated(handle) == PAGES - 1
    assert memory.sum(dtype=np.int64) == 7 * mmap.PAGESIZE
    os.close(handle)


def test_a_mapping_of_a_peer_s_adds_no_page_to_its_memory():
    handle, memory = memory_of()
    with reading(memory) as owner:
        with reading(np.zeros(64, dtype=np.uint8)) as reader:
            peer = reader.connect(owner.metadata())
            until(quiet)
            assert not peer.ways.any()  # it is mapped
        assert allocated(handle) == 1
    os.close(handle)


def test_advice_about_memory_that_is_not_there_is_no_error():
    one = Prefault()
    one.own(1 << 20, 64 << 20)
    one.peers(1 << 20, 64 << 20)
    until(quiet)
    handle, memory = memory_of()
    one.own(memory.ctypes.data, memory.nbytes)  # and the next is touched all the same
    until(quiet)
    assert allocated(handle) == PAGES
    os.close(handle)


def test_more_memory_than_there_is_left_is_not_touched():
    handle, memory = memory_of()
    Prefault().own(memory.ctypes.data, 1 << 60)
    assert quiet() and allocated(handle) == 1
    os.close(handle)


@pytest.mark.parametrize("prefault", [True, False])
def test_a_decode_touches_its_pages_unless_told_not_to(prefault):
    handle, memory = memory_of()
    size = mmap.PAGESIZE
    buffer = Buffer("b", "s", memory.ctypes.data, size, size, PAGES, padding=True)
    layout = PoolLayout((buffer,), (), (Space("s", "slot", reserved=0),), 0)
    with DecodeEndpoint(layout, create_engine("local"), threaded=False, prefault=prefault):
        until(quiet)
        assert allocated(handle) == (PAGES if prefault else 1)
    os.close(handle)
