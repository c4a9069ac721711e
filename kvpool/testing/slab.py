"""Memory of a device that is full of random bytes, and what it should hold."""

from __future__ import annotations

import numpy as np
import torch

from kvpool.device import Device
from kvpool.testing.case import fail
from kvpool.testing.memory import off
from kvpool.testing.values import Bytes


def random_slab(
    device: Device, random: np.random.Generator, nbytes: int
) -> tuple[Bytes, torch.Tensor]:
    """Random bytes, and memory of the device that holds them."""
    raw = random.integers(0, 256, nbytes, dtype=np.uint8)
    slab = device.allocate(nbytes)
    slab.copy_(torch.from_numpy(raw))
    return raw, slab


def same_slab(device: Device, slab: torch.Tensor, expected: Bytes, what: str) -> None:
    """Ends the check at the first byte that is not as expected, after `what` was done."""
    found = off(device, slab)
    wrong = np.flatnonzero(found != expected)
    if wrong.size:
        at = int(wrong[0])
        fail(
            f"{what}: byte {at} is {int(found[at]):#04x}, expected {int(expected[at]):#04x} "
            f"({wrong.size:,} of {found.size:,} bytes differ)."
        )
