"""Rows for `kvpool conform`, and what they leave behind, for the tests of all serving engines."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from disagg.testing.arena import Arena
from disagg.testing.suite import EngineSpec, Pair, ServerSettings, Suite
from tests.engines.launcher import ROOT

STUBS = ROOT / "tests/engines/sglang/stubs"


def side(block_size: int = 32, engine: str = "vllm", **more: Any) -> ServerSettings:
    """A server's settings; what is not given is usual."""
    usual = {"tp": 1, "pp": 1, "dtype": "bfloat16", "draft": None, "method": None, "args": {}}
    return ServerSettings(engine=engine, block_size=block_size, **{**usual, **more})


def pair(
    prefill: ServerSettings,
    decode: ServerSettings,
    *,
    model: str = "llama",
    connector: str = "kvpool",
) -> Pair:
    """A row of two prompts."""
    return Pair(
        name=f"{connector}: {model}",
        connector=connector,
        model=model,
        prefill=prefill,
        decode=decode,
        transport="local",
        settings={},
        prompts=(70, 200),
        new_tokens=16,
    )


@contextmanager
def arena(folder: Path, **pythons: str) -> Iterator[Arena]:
    """An arena with the Python of each engine. No process of it is left behind."""
    paths = {"vllm": str(ROOT), "sglang": os.pathsep.join(map(str, (STUBS, ROOT)))}
    engines = {
        name: EngineSpec(name=name, python=python, pythonpath=paths[name], env={})
        for name, python in pythons.items()
    }
    make = next(iter(pythons)), "-m", "tests.engines.vllm.models", "{folder}"
    models = {name: (*make, name) for name in ("llama", "qwen3_next")}
    suite = Suite(engines=engines, models=models, pairs=())
    with Arena(suite, folder, lambda line: print(line, flush=True)) as made:
        yield made
    assert not left(folder)


def left(folder: Path, seconds: float = 20.0) -> list[str]:
    """Processes whose command line or environment names the folder, and that do not end by then: a
    server that is killed leaves workers that take a moment.
    """
    until = time.monotonic() + seconds
    while (found := _processes(folder)) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def _processes(folder: Path) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            text = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in text and int(process.name) != os.getpid():
            found.append(process.name)
    return found
