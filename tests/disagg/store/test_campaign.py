"""Seeded runs of writers, readers, kills and damage over one folder: what is read is always what
was written of that prompt, by whichever engine; all else is a miss.
"""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from kvpool import Shard
from kvpool.layout import RequestAddress
from tests import oracle
from tests.disagg.store.stores import CHUNK, outcome, stores
from tests.pools import dsv4, hybrid, mha, mla, nsa, swa
from tests.processes import Child

BUILDS = {"mha": mha, "mla": mla, "nsa": nsa, "swa": swa, "hybrid": hybrid, "dsv4": dsv4}
ROOM = {"num_pages": 40, "num_window_pages": 40}
CHUNKS, PROMPTS = 3, 5
ENDS = range(CHUNK, CHUNKS * CHUNK + 1, CHUNK)
SEEDS = [seed if seed < 12 else pytest.param(seed, marks=pytest.mark.long) for seed in range(200)]


def prompt(number):
    return np.random.default_rng(number).integers(0, 1000, CHUNKS * CHUNK)


def engine(build, chance):
    """The ranks of an engine of any geometry."""
    pages = {"page_size": chance.choice([8, 24])}  # which every ratio divides
    size = chance.choice([1, 2])
    placement = chance.choice(["layer", "page"])
    return [
        build.but(**ROOM, **pages, shard=Shard(rank, size), placement=placement)()
        for rank in range(size)
    ]


def write(pipe, url, name, seed):
    """An engine that computes prompts chunk by chunk, and writes, until it is killed."""
    chance = random.Random(seed)
    holders = engine(BUILDS[name], chance)
    with stores(url, holders) as writing:
        pipe.send("ready")
        for number in chance.sample(range(PROMPTS), PROMPTS):
            tables = [oracle.place(holder, ENDS[-1], seed) for holder in holders]
            for stop in ENDS:
                for store, holder, table in zip(writing, holders, tables):
                    address = RequestAddress(stop, table.spans)
                    oracle.write(holder, address, range(stop - CHUNK, stop), salt=number)
                    store.write(prompt(number)[:stop], address)
    pipe.send("done")


def damage(folder, chance):
    """What disks, people and other software do to some of the files."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in chance.sample(files, min(len(files), chance.randrange(4))):
        size = path.stat().st_size
        match chance.choice(["cut", "flip", "swap", "delete", "empty", "longer"]):
            case "cut":
                path.write_bytes(path.read_bytes()[: chance.randrange(size)] if size else b"")
            case "flip" if size:
                data = bytearray(path.read_bytes())
                data[chance.randrange(size)] ^= 1 << chance.randrange(8)
                path.write_bytes(data)
            case "swap":
                others = [file for file in files if file != path and file.exists()]
                if others:
                    shutil.copy(chance.choice(others), path)
            case "delete":
                path.unlink()
            case "empty":
                path.write_bytes(b"")
            case "longer":
                path.write_bytes(path.read_bytes() + b"more")


def read(url, build, chance):
    """An engine that looks all prompts up and reads what there is; how many tokens that were."""
    holders, tokens = engine(build, chance), 0
    with stores(url, holders) as reading:
        for number in range(PROMPTS):
            hits = [outcome(store, store.ask(prompt(number))).hit for store in reading]
            count = min(hit.tokens for hit in hits)
            failures = []
            for store, holder in zip(reading, holders):
                oracle.blank(holder)
                address = oracle.place(holder, count, number)
                if count:
                    job = store.read(prompt(number)[:count], address)
                    failures.append(outcome(store, job).failure)
                if count and failures[-1] is None:
                    assert oracle.holds(holder, address, salt=number), (number, count)
                    tokens += count
    return tokens


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_wrong_is_read(seed, tmp_path):
    chance = random.Random(seed)
    name, url = chance.choice([*BUILDS]), f"file://{tmp_path}/floor"
    folder, read_tokens = Path(tmp_path) / "floor", 0
    for turn in range(3):
        with Child(write, url, name, 1000 * seed + turn) as writer:
            assert writer.answer() == "ready"
            if turn == 2 or chance.random() < 0.5:
                assert writer.answer() == "done"
            else:
                time.sleep(chance.random() * 0.05)
        damage(folder, chance)
        read_tokens += read(url, BUILDS[name], chance)
    assert read_tokens
