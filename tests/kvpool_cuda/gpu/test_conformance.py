"""The kit that every device must pass."""

from __future__ import annotations

import subprocess
import sys


def test_the_conformance_kit_passes():
    kit = [sys.executable, "-m", "pytest", "-q", "--pyargs", "kvpool.testing"]
    done = subprocess.run([*kit, "--device", "cuda:0"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:]
