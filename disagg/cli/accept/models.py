"""The demo of every family: prefill in another process, decode in this one, compared with one
process and with transformers' own cache.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from io import StringIO
from multiprocessing.connection import Connection

from rich.console import Console

from disagg.cli.accept.report import FAILED, NOT_HERE, Row
from disagg.cli.accept.scope import Scope, Wrong
from disagg.cli.demo.models import MODELS, Settings
from disagg.cli.demo.processes import PrefillProcess, decode_process, prefill_process, spawned
from kvpool.extras import needs

DTYPE = "bfloat16"
PACKINGS = (DTYPE, "fp8")
QUICK_MODEL = "llama"


def model_rows(scope: Scope) -> list[Row]:
    """A row for each family and packing."""
    if find_spec("transformers") is None:
        return [Row("demo", NOT_HERE, f"the demo {needs('transformers')}")]
    wanted = [(QUICK_MODEL, DTYPE)] if scope.quick else [(m, p) for m in MODELS for p in PACKINGS]
    rows: list[Row] = []
    while len(rows) < len(wanted):
        with spawned(_serve) as peer:  # one process for all, and another after a failure
            for model, packing in wanted[len(rows) :]:
                played = partial(_played, scope, peer, model, packing)
                row = scope.tried(f"{model}, {packing}", played)
                rows.append(row)
                if row.state == FAILED:
                    break
    return rows


def _played(scope: Scope, peer: PrefillProcess, model: str, packing: str) -> str:
    tokens, chunk, steps = (20, 12, 2) if scope.small else (300, 100, 8)
    settings = Settings(
        *(model, "local", (tokens,), chunk, DTYPE, packing, 0, 1, 0, 0, scope.device.name)
    )
    peer.pipe.send(settings)
    (decoded,) = decode_process(peer, settings, steps, Console(file=StringIO()))
    if wrong := [check.found for check in decoded.checks if not check.passed]:
        raise Wrong("; ".join(wrong))
    return "; ".join(check.found for check in decoded.checks)


def _serve(pipe: Connection) -> None:
    """The prefill process: one demo after the other, until it is killed."""
    while True:
        prefill_process(pipe, pipe.recv())
