"""Tests inside a serving engine's own environment: collected only where the engine is installed."""

from importlib.util import find_spec

collect_ignore_glob = []
if not find_spec("vllm"):
    collect_ignore_glob += ["test_*.py", "vllm"]
if not find_spec("sglang"):
    collect_ignore_glob += ["sglang"]
