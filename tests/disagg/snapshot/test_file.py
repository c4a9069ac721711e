"""The file as others see it: safetensors whose tensors are the request's state, written at once or
not at all.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tracemalloc
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from disagg.snapshot import STAGING_BYTES, Header, SnapshotRefused, check, inspect, load, save
from kvpool import MHAPool, Space
from kvpool.item import Cell, Repeat
from tests import oracle
from tests.pools import CLASSES, dsv4, hybrid, mha, mla

safetensors = pytest.importorskip("safetensors.torch")
ROOM = {"num_pages": 12, "num_window_pages": 16}
TORCH = {"float8_e8m0fnu": torch.uint8}  # of which not all readers of safetensors know


def live(space, tokens):
    """Entries of a request that are alive, those of a ring by where they lie in it."""
    entries = oracle.live(space, range(tokens), tokens)
    if space.kind != "ring":
        return entries, np.arange(entries.size)
    return entries, entries % space.entries_per_item


@pytest.mark.parametrize("packing", ["bf16", "fp8"])
@pytest.mark.parametrize("name", CLASSES)
def test_safetensors_reads_each_region_as_a_tensor_of_live_entries(name, packing, tmp_path):
    pool, tokens = CLASSES[name](packing=packing, **ROOM), 21
    save(tmp_path / "a", pool.layout, oracle.filled(pool, tokens))
    found = safetensors.load_file(tmp_path / "a")
    assert len(found) == len(pool.layout.regions)
    for region in pool.layout.regions:
        tensor = found[f"{region.owner}.{region.layer}.{region.role}"]
        space = pool.layout.space_of(region)
        assert tensor.dtype == TORCH.get(region.dtype, getattr(torch, region.dtype))
        inner = [axis.size for axis in region.inner_axes]
        entries, at = live(space, tokens)
        ring = [1, space.entries_per_item] if space.kind == "ring" else [max(1, entries.size)]
        assert list(tensor.shape[: len(ring) + len(inner)]) == [*ring, *inner]
        held = tensor.contiguous().view(torch.uint8).numpy().reshape(-1, *inner, region.width)
        expected = np.zeros_like(held)  # no byte of what else the pool's pages hold
        steps = [np.arange(axis.start, axis.stop) for axis in region.inner_axes]
        expected[at] = oracle.values(region.key, [entries, *steps, np.arange(region.width)])
        assert (held == expected).all(), region


def test_the_file_does_not_depend_on_pages_order_placement_or_what_was_there(tmp_path):
    files = set()
    cases = product((2, 16), ("nhd", "hnd"), ("layer", "page", "stack"))
    for number, (page, order, placement) in enumerate(cases):
        pool = mha(page_size=page, num_pages=22, order=order, placement=placement)
        address = oracle.place(pool, 21, number)
        oracle.blank(pool, number)
        oracle.write(pool, address, range(21))
        save(tmp_path / "a", pool.layout, address)
        files.add((tmp_path / "a").read_bytes())
    assert len(files) == 1


def small():
    """Pages, a window and a state, of fixed names and shapes."""
    page = Repeat("entry", 4, Repeat("head", 2, Cell("k", 3, "bf16")))
    parts = [
        (0, "kv", 5, page),
        (1, "swa", 9, Repeat("entry", 2, Cell("latent", 5, "e4m3"))),
        (2, "state", 3, Cell("temporal", 4, "f32")),
    ]
    return oracle.built(parts, [Space("swa", "paged", 2, window=5), Space("state", "slot")], page=4)


def test_files_of_this_version_are_read():
    """Where this fails, `VERSION` of headers has to rise, and to be that of this file."""
    dest = small()
    oracle.blank(dest)
    address = oracle.place(dest, 11)
    load(Path(__file__).with_name("version1.safetensors"), dest.layout, address)
    oracle.assert_holds(dest, address)


def test_a_header_says_what_the_file_holds(tmp_path):
    pool = hybrid(**ROOM)
    agreed = {"vocab_size": 128, "rope_theta": 1e4, "model": "qwen3_next"}
    save(tmp_path / "a", pool.layout, oracle.filled(pool, 21), request="chat-7", conventions=agreed)
    header = inspect(tmp_path / "a")
    assert isinstance(header, Header)
    assert (header.tokens, header.request, header.conventions) == (21, "chat-7", agreed)
    assert [region.key for region in header.layout.regions] != []
    assert {region.key for region in header.layout.regions} == {r.key for r in pool.layout.regions}
    with safetensors.safe_open(tmp_path / "a", "pt") as file:
        said = file.metadata()
    assert said["kvpool_snapshot"] == "1" and said["tokens"] == "21" and said["request"] == "chat-7"
    assert check(tmp_path / "a") == header
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


BIG = {"layers": range(8), "num_kv_heads": 8, "head_dim": 128, "dtype": "bf16", "page_size": 32}


def test_memory_stays_bounded_whatever_the_request(tmp_path):
    tokens = 2048  # 64 MiB
    pool, dest = (MHAPool(**BIG, num_pages=66, order=each) for each in ("nhd", "hnd"))
    assert pool.layout.live_bytes(tokens) == 64 << 20
    address, into = oracle.place(pool, tokens, 1), oracle.place(dest, tokens, 2)
    for layer in pool.layers:
        for view in (pool.view("k", layer), pool.view("v", layer)):
            view.copy_(torch.arange(view.numel()).view(view.shape) * (layer + 1) % 251)
    tracemalloc.start()
    try:
        save(tmp_path / "a", pool.layout, address)
        saved = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        load(tmp_path / "a", dest.layout, into)
        loaded = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert max(saved, loaded) < STAGING_BYTES + (8 << 20)
    there, here = (torch.tensor(each.spans["kv"].ids) for each in (address, into))
    for layer in pool.layers:
        for role in ("k", "v"):
            assert pool.view(role, layer)[there].equal(dest.view(role, layer)[here])


class Full(OSError):
    pass


@pytest.mark.parametrize("call", ["ftruncate", "pwrite", "fsync", "replace"])
@pytest.mark.parametrize("before", [b"what was there", None], ids=["old file", "no file"])
def test_a_save_that_fails_leaves_what_was_there(call, before, tmp_path, monkeypatch):
    pool, path = dsv4(**ROOM), tmp_path / "a"
    if before is not None:
        path.write_bytes(before)
    real, calls = getattr(os, call), []

    def fails(*args):
        calls.append(args)
        if call == "pwrite" and len(calls) < 7:  # in the midst of the data
            return real(*args)
        raise Full(errno.ENOSPC, "no space left on device")

    address = oracle.filled(pool, 21)
    monkeypatch.setattr(os, call, fails)
    with pytest.raises(Full):
        save(path, pool.layout, address)
    monkeypatch.undo()
    assert [p.read_bytes() for p in tmp_path.iterdir()] == ([] if before is None else [before])


KILLED = """
import os, signal, sys
from disagg.snapshot import save
from tests.pools import mla
from tests import oracle

pool = mla()
address = oracle.place(pool, 13)
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
save(sys.argv[1], pool.layout, address)
"""


def test_a_save_that_is_killed_leaves_what_was_there(tmp_path):
    pool, path = mla(), tmp_path / "a"
    save(path, pool.layout, oracle.filled(pool, 9))
    before = path.read_bytes()
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == before and check(path).tokens == 9
    (left,) = (each for each in tmp_path.iterdir() if each != path)
    assert left.name.startswith(".kvpool-")


def test_a_request_that_is_written_to_while_it_is_saved_is_refused_at_load(tmp_path, monkeypatch):
    pool = mla()
    address, real = oracle.filled(pool, 13), os.pwrite

    def writes(*args):
        oracle.blank(pool, 7)
        return real(*args)

    monkeypatch.setattr(os, "pwrite", writes)
    save(tmp_path / "a", pool.layout, address)
    with pytest.raises(SnapshotRefused, match="or the request was written to while it was saved"):
        check(tmp_path / "a")
