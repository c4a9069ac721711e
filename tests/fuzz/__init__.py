"""Hostile bytes for everything that decodes a peer's: `python -m tests.fuzz` (docs/reliability.md).

`tests/fuzz/test_hostile.py` runs the same targets, with fewer inputs, in the suite.
"""
