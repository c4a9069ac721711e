"""Processes for tests: forked off one that has imported torch, they start in milliseconds."""

from __future__ import annotations

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "disagg.endpoint", "tests.oracle", "tests.pools"])
