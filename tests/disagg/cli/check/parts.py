"""Contracts of small engines, and `kvpool check` of both sides."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager

from typer.testing import CliRunner

from disagg.contract import Contract, ContractRank
from kvpool import MHAPool
from kvpool.cli import app
from kvpool.layout.formats import Shard
from tests.outputs import output_of
from tests.ports import free_port

HEADS = 4
SAID = {"model": "small"}


def contract(engine="local", *, tp=1, page=16, serves="prefill", said=SAID, dim=32, addresses=()):
    """Of an engine whose pools have no memory that a check could touch."""
    ranks = []
    for number in range(tp):
        pool = MHAPool(
            layers=range(2),
            num_kv_heads=HEADS,
            head_dim=dim,
            dtype="bf16",
            num_pages=3,
            page_size=page,
            shard=Shard(number, tp),
        )
        address = addresses[number] if addresses else None
        ranks.append(ContractRank.of(number, pool.layout, said, address))
    return Contract(
        engine=engine, serves=(serves,), size=tp, ranks=tuple(ranks), versions={"kvpool": "0.1.0"}
    )


def saved(folder, name, **shape):
    """Such a contract as a file."""
    path = folder / name
    path.write_text(contract(**shape).to_json())
    return str(path)


def run(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["check", *map(str, arguments)])


def told(*arguments, status=0):
    """What it says as JSON, in this process."""
    done = run(*arguments, "--json")
    assert done.exit_code == status, done.output
    return output_of("check", done.stdout)


def reason(*arguments):
    """The only reason against: what it is about, and its words."""
    return reason_of(told(*arguments, status=1))


def reason_of(document):
    """The only reason against of a document."""
    assert document["check"] is False and document["moved"] is None
    (refused,) = document["refused"]
    return refused["about"], refused["reason"]


def command(*arguments):
    return [sys.executable, "-m", "kvpool", "check", *map(str, arguments), "--json"]


def told_by_process(*arguments, before=(), status=0):
    """The same of a process of its own, whose UCX was not loaded before."""
    line = [*before, *command(*arguments)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    return output_of("check", done.stdout)


@contextmanager
def serving(path, *arguments, place=None, before=()):
    """`kvpool check --serve`; the addresses at which it offers bytes."""
    place = place or f"tcp://127.0.0.1:{free_port()}"
    line = [*before, *command(path, "--serve", place, *arguments)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    try:
        yield output_of("check", process.stdout.readline())["serves"]
        if not before:  # on another host it ends with that
            process.terminate()
            assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
