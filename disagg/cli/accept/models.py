"""The demo of every family: prefill in another process, decode in this one, compared with one
process and with transformers' own cache.
"""

from __future__ import annotations

from contextlib import closing
from functools import partial
from importlib.util import find_spec
from io import StringIO

from rich.console import Console

from disagg.cli.accept.report import FAILED, NOT_HERE, Row
from disagg.cli.accept.scope import Scope
from disagg.cli.demo.decode import decoded_prompts
from disagg.cli.demo.models import MODELS, DemoSettings
from disagg.cli.demo.prefill import PrefillSide
from kvpool.extras import needs
from kvpool.process import Restarted
from kvpool.testing.case import fail

DTYPE = "bfloat16"
PACKINGS = (DTYPE, "fp8")
QUICK_MODEL = "llama"


def model_rows(scope: Scope) -> list[Row]:
    """A row for each family and packing."""
    if find_spec("transformers") is None:
        return [Row("demo", NOT_HERE, f"the demo {needs('transformers')}")]
    wanted = [(QUICK_MODEL, DTYPE)] if scope.quick else [(m, p) for m in MODELS for p in PACKINGS]
    rows = []
    with closing(Restarted(PrefillSide)) as prefill:
        for model, packing in wanted:
            played = partial(_played, scope, prefill, model, packing)
            rows.append(scope.tried(f"{model}, {packing}", played))
            if rows[-1].state == FAILED:
                prefill.close()
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
