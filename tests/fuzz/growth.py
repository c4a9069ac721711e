"""Time as an oracle: what an input costs grows as its bytes do.

It is processor time of one thread, and of several tries the least: a busy machine makes some tries
slower, and not all. Work by the square of the input costs sixteen times as much a byte where the
input is sixteen times as large.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.fuzz.guard import Finding
from tests.fuzz.trees import Grower

SMALL, TIMES = 4 << 10, 16
"""Bytes of the smallest input, and how many times as large the next one is."""
MAX_GROWTH = 6.0
"""Of the cost of a byte from one input to the next."""
NOISE_SECONDS = 0.01
"""An input that costs less grows into nothing that could be measured."""
MAX_SECONDS_A_BYTE, BASE_SECONDS = 10e-6, 0.1
TRIES = 6


@dataclass(frozen=True)
class Growth:
    """`run` takes an input, whatever it is; `growers` make larger and larger ones."""

    run: Callable[[bytes], object]
    growers: Mapping[str, Grower]


def sized(grow: Grower, size: int, most: int = 1 << 22) -> bytes:
    """The first input of at least `size` bytes, of twice as many parts each time; or the largest,
    where the sample does not grow.
    """
    count, data = 1, grow(1)
    while len(data) < size and count < most:
        count *= 2
        data = grow(count)
    return data


def measured(run: Callable[[bytes], object], data: bytes, enough: float, tries: int) -> float:
    """Seconds of processor time for an input: the least of several tries, or the first that is
    `enough`.
    """
    least = float("inf")
    gc.disable()  # a collection of what other tests left is no input's cost
    try:
        for _ in range(tries):
            began = time.thread_time()
            run(data)
            least = min(least, time.thread_time() - began)
            if least <= enough:
                break
    finally:
        gc.enable()
    return least


def check(growth: Growth, name: str) -> None:
    """Runs an input of `SMALL` bytes and one of `TIMES` as many. Raises Finding where a byte of the
    larger one costs more than it may, or much more than one of the smaller.
    """
    small, large = (sized(growth.growers[name], size) for size in (SMALL, SMALL * TIMES))
    # what the other is compared with is measured with care
    before = measured(growth.run, small, 0.0, tries=3) / len(small)
    allowed = BASE_SECONDS + MAX_SECONDS_A_BYTE * len(large)
    allowed = min(allowed, max(NOISE_SECONDS, MAX_GROWTH * before * len(large)))
    seconds = measured(growth.run, large, allowed, TRIES)
    if seconds > allowed:
        now, then = 1e6 * seconds / len(large), 1e6 * before
        raise Finding(
            f"{name}: {seconds:.3f} s for {len(large)} bytes, {now:.2f} us a byte, "
            f"{then:.2f} us a byte of a smaller one."
        )
