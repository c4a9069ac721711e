"""Real models, with prefill's and decode's pools on the GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from disagg.cli.demo.models import MODELS
from disagg.engines.base import engine_class

KVPOOL = str(Path(sys.executable).parent / "kvpool")
ENGINES = [name for name in ("local", "nixl") if engine_class(name).availability() is None]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("packing", ["bfloat16", "fp8"])
@pytest.mark.parametrize("model", MODELS)
def test_decode_elsewhere_equals_one_process(model, packing, engine):
    command = [KVPOOL, "demo", "--device", "cuda:0", "--model", model, "--engine", engine]
    command += ["--dtype", "bfloat16", "--packing", packing, "--new-tokens", "8"]
    command += ["--prompt-tokens", "300", "--chunk-tokens", "100"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
