"""The arguments of checks, and how a check fails."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from kvpool.device import Device
from kvpool.pools.base import KVPool

Build = Callable[..., KVPool]


class ConformanceError(AssertionError):
    """A check failed. `device`, `pool` (empty without a pool) and `check` are names; the message
    has them too, with layer, role and both values.
    """

    def __init__(self, device: str, pool: str, check: str, sentence: str) -> None:
        self.device, self.pool, self.check = device, pool, check
        of = f", pool {pool}" if pool else ""
        super().__init__(f"device {device}{of}, check {check}: {sentence}")


class Inapplicable(Exception):
    """A check does not apply here; the message says why."""


class CheckFailure(Exception):
    """A check failed; `run` adds the names of device, pool and check to this sentence."""


@dataclass(frozen=True, slots=True)
class Case:
    """A pool on a device. `others` are arguments of pools that must exchange state with it: other
    page sizes, placements, shards.
    """

    device: Device
    pool: str
    build: Build
    others: Sequence[Mapping[str, Any]] = ()

    def make(self, **more: Any) -> KVPool:
        """The pool, on the device unless `more` says otherwise."""
        return self.build(**{"device": self.device.name, **more})


def fail(sentence: str) -> NoReturn:
    """Fails the check."""
    raise CheckFailure(sentence)


def equal(what: str, actual: object, expected: object) -> None:
    """Fails the check unless both are equal."""
    if actual != expected:
        fail(f"{what}: {actual!r} where {expected!r} is expected.")


def raises(kind: type[Exception], what: str, call: Callable[[], object]) -> str:
    """The message of the `kind` that `call` raises; fails the check if it does not."""
    try:
        call()
    except kind as error:
        return str(error)
    except Exception as error:
        fail(f"{what}: {type(error).__name__} ({error}) where {kind.__name__} is expected.")
    fail(f"{what}: accepted where {kind.__name__} is expected.")


def random_of(*names: object) -> np.random.Generator:
    """Random numbers, the same in every run."""
    return np.random.default_rng(zlib.crc32(repr(names).encode()))
