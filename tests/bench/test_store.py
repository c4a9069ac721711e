"""A store in a folder beside copies of its files: hits of 2,048 and 8,192 tokens into pages of 16,
lookups, and what the caller of `ask` and `write` waits for.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from disagg.store import Store
from kvpool import MHAPool
from tests.bench.conftest import shuffled

PAGE = 16
SHAPE = {"layers": range(16), "num_kv_heads": 8, "head_dim": 128, "dtype": "bf16"}
"""64 KiB a token: a chunk is 16 MiB."""


def pool(tokens):
    return MHAPool(**SHAPE, num_pages=tokens // PAGE + 1, page_size=PAGE)


def prompt(tokens, seed=0):
    return np.random.default_rng(seed).integers(0, 30_000, tokens)


def filled(url, tokens):
    """A store with a prompt's chunks, and the pool that they were written from."""
    holder = pool(tokens)
    store = Store(url, holder.layout, room=1 << 31)
    store.write(prompt(tokens), shuffled(tokens // PAGE, 0, PAGE))
    while store.stats().queued_bytes:
        time.sleep(0.01)
    assert store.stats().counts["written"] == tokens // 256
    return holder, store


@pytest.mark.parametrize("tokens", [2048, 8192])
def test_hits_beside_copies_of_the_files(tokens, tmp_path, paired, timed):
    tokens = tokens if timed else 512
    _, store = filled(f"file://{tmp_path}/floor", tokens)
    files = sorted(tmp_path.rglob("*.full"))
    copies = tmp_path / "copies"
    copies.mkdir()
    asked, address = store.keys(prompt(tokens)), shuffled(tokens // PAGE, 1, PAGE)

    def ours():
        assert store.wait(store.read(asked, address)).failure is None

    def reference():
        for number, file in enumerate(files):
            shutil.copyfile(file, copies / f"{number}")

    paired(ours, reference, rounds=10)
    store.close()


def test_a_lookup_beside_a_stat_of_each_file(tmp_path, paired, timed):
    tokens = 8192 if timed else 512
    _, store = filled(f"file://{tmp_path}/floor", tokens)
    files = [str(file) for file in tmp_path.rglob("*.full")]
    asked = store.keys(prompt(tokens))

    def ours():
        assert store.lookup(asked) == tokens

    paired(ours, lambda: [Path(file).stat() for file in files])
    store.close()


def test_what_a_scheduler_waits_for_beside_hashing(tmp_path, paired, timed):
    """`ask` and `read` of 8,192 tokens, whose keys are known, beside making these keys."""
    tokens = 8192 if timed else 512
    _, store = filled(f"file://{tmp_path}/floor", tokens)
    tokens_asked, address = prompt(tokens), shuffled(tokens // PAGE, 1, PAGE)
    asked = store.keys(tokens_asked)
    jobs = []

    def ours():
        jobs.append(store.read(asked, address))
        store.ended()

    paired(ours, lambda: store.keys(tokens_asked))
    for job in jobs:
        store.abort(job)
    store.close()
