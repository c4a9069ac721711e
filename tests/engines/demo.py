"""What the demos of serving engines have in common: options, a console, and how they end."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from tests.engines.pair import LENGTHS
from tests.engines.process import EngineFailed
from tests.engines.vllm import models

console = Console(width=None if sys.stdout.isatty() else 100)


def parser(name: str, what: str | None) -> argparse.ArgumentParser:
    """Of `make NAME`, whose options are in its variable of that name: what all demos take."""
    variable = name.upper().replace("-", "_")
    made = argparse.ArgumentParser(
        prog=f"make {name} {variable}=...", description=what, allow_abbrev=False
    )
    add = made.add_argument
    add("--prompt-tokens", type=int, nargs="+", default=LENGTHS, help="(300 77 16 513)")
    add("--tokens", type=int, default=24, help="to decode (24)")
    add("--folder", help="for models and logs (a new one under /tmp)")
    return made


def pair_parser(name: str, what: str | None) -> argparse.ArgumentParser:
    """As `parser`, with a model and what moves its state from prefill to decode."""
    made = parser(name, what)
    add = made.add_argument
    add("--model", default="llama", choices=models.MODELS, help="which tiny model")
    add("--engine", default="local", help="what moves bytes: local, nixl, mooncake (local)")
    return made


def shown(
    name: str, options: argparse.Namespace, run: Callable[[argparse.Namespace, Path], bool]
) -> int:
    """0 where `run` finds all equal, 1 where something differs or an engine fails."""
    folder = Path(options.folder or tempfile.mkdtemp(prefix=f"kvpool-{name}-"))
    try:
        good = run(options, folder)
    except EngineFailed as failure:
        console.print(str(failure), markup=False, style="red")
        return 1
    except KeyboardInterrupt:
        return 1
    finally:
        console.print(f"logs: {folder}/logs", highlight=False)
    console.print("[green]PASS" if good else "[red]FAIL")
    return int(not good)
