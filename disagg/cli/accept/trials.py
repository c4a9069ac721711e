"""Hand-offs of every engine, and the demo of every family, each with its prefill in one process."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from importlib.util import find_spec
from io import StringIO

from rich.console import Console

from disagg.cli.accept.report import FAILED, NOT_HERE, Row
from disagg.cli.accept.scope import Scope
from disagg.cli.bench.handoff.trials import MOVES, TrialPrefill, moved
from disagg.cli.demo.decode import decoded_prompts
from disagg.cli.demo.models import MODELS, DemoSettings
from disagg.cli.demo.prefill import PrefillSide
from disagg.engines.base import engine_class, engine_names
from kvpool.extras import needs
from kvpool.process import Restarted
from kvpool.testing.case import fail

DTYPE, QUICK_MODEL = "bfloat16", "llama"


def engine_rows(scope: Scope) -> list[Row]:
    """A row for each engine that does not work here, and for each hand-off of the others."""
    rows = []
    with closing(Restarted(TrialPrefill, scope.device.name)) as prefill:
        for engine in engine_names():
            reason = engine_class(engine).availability()
            if reason is not None:
                rows.append(Row(engine, NOT_HERE, reason))
                continue
            for move in MOVES:
                trial = partial(moved, prefill, scope.device.name, engine, move, scope.small)
                rows.append(scope.tried(f"{engine}, {move}", trial))
    return rows


def model_rows(scope: Scope) -> list[Row]:
    """A row for each family and packing."""
    if find_spec("transformers") is None:
        return [Row("demo", NOT_HERE, f"the demo {needs('transformers')}")]
    wanted = [(model, packing) for model in MODELS for packing in (DTYPE, "fp8")]
    rows = []
    with closing(Restarted(PrefillSide)) as prefill:
        for model, packing in [(QUICK_MODEL, DTYPE)] if scope.quick else wanted:
            played = partial(_played, scope, prefill, model, packing)
            rows.append(scope.tried(f"{model}, {packing}", played))
            if rows[-1].state == FAILED:
                prefill.close()  # another process for the next
    return rows


def _played(scope: Scope, prefill: Restarted, model: str, packing: str) -> str:
    tokens, chunk, steps = (20, 12, 2) if scope.small else (300, 100, 8)
    settings = DemoSettings(
        model=model,
        prompts=(tokens,),
        chunk_tokens=chunk,
        new_tokens=steps,
        dtype=DTYPE,
        packing=packing,
        device=scope.device.name,
    )
    (prompt,) = decoded_prompts(prefill(), settings, Console(file=StringIO()))
    if wrong := [check.found for check in prompt.checks if not check.passed]:
        fail("; ".join(wrong))
    return "; ".join(check.found for check in prompt.checks)
