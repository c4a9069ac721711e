"""Real models over the kernels: both processes have their pools on device `interpret`."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from disagg.cli.demo.models import MODELS

KVPOOL = str(Path(sys.executable).parent / "kvpool")
USUAL = {("deepseek_v32", "fp8"), ("gpt_oss", "bfloat16")}


@pytest.mark.parametrize(
    ("model", "packing"),
    [
        pytest.param(*each, marks=() if each in USUAL else pytest.mark.long)
        for each in product(MODELS, ("bfloat16", "fp8"))
    ],
)
def test_the_kernels_serve_a_real_model(model, packing):
    done = subprocess.run(
        [
            *(KVPOOL, "demo", "--device", "interpret", "--model", model, "--packing", packing),
            *("--dtype", "bfloat16", "--prompt-tokens", "20", "--chunk-tokens", "12"),
            *("--new-tokens", "2"),
        ],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS logits of 2 of 2 decoded steps bit-equal to one process" in done.stdout
