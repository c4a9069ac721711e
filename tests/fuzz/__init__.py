"""Hostile bytes for everything that decodes a peer's bytes: `python -m tests.fuzz`.

`tests/fuzz/test_hostile.py` runs the same targets, with fewer inputs, in the suite.
"""
