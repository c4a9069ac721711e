"""The work of a benchmark case: what is timed, its reference, and the check of its result."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from kvpool.device import Device

LAYERS, PAGE = 61, 64
"""Layers of DeepSeek-V3, and tokens per page."""


class CannotRun(Exception):
    """The reason why this device or engine cannot run a case."""


class WrongBytes(Exception):
    """A case computed a wrong result."""


class Work(NamedTuple):
    """A case with its memory. `check` runs after the first call of `ours`, and raises WrongBytes if
    its result is wrong. `clock` gives seconds; one of its own runs only while what is timed does.
    """

    ours: Callable[[], object]
    reference: Callable[[], object]
    check: Callable[[], None]
    clock: Callable[[], float] = time.perf_counter


def plain_copy(device: Device, nbytes: int) -> Callable[[], object]:
    """The reference: a copy of `nbytes` contiguous bytes."""
    src, dst = (device.allocate(nbytes) for _ in range(2))
    if src.device.type == "cpu":  # memcpy is faster than torch's copy
        source, dest = src.numpy(), dst.numpy()
        return lambda: np.copyto(dest, source)
    return lambda: dst.copy_(src)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random bytes on the host."""
    bytes_ = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return torch.from_numpy(bytes_)


def need_equal(what: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Raises WrongBytes where two uint8 tensors `[N, byte]` differ."""
    wrong = (actual.cpu() != expected.cpu()).flatten(1).any(1)
    if wrong.any():
        first = int(wrong.nonzero()[0])
        raise WrongBytes(f"{what}: {int(wrong.sum())} of {len(wrong)} differ, the first: {first}.")
