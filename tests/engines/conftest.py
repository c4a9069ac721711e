"""Tests inside a serving engine's own environment: collected only where the engine is installed."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]
