"""All cases, by group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

from disagg.cli.bench.case import BenchCase, BenchContext, Sizes
from disagg.cli.bench.handoff.cases import handoff_cases
from disagg.cli.bench.handoff.decode import DecodeSides
from disagg.cli.bench.host import allocator_cases, bind_cases, plan_cases
from disagg.cli.bench.moves import move_cases, run_cases
from disagg.cli.bench.peer import PeerReaders
from disagg.cli.bench.stores import load_cases, store_cases
from disagg.cli.bench.transfers import memory_bytes, transfer_cases
from kvpool.device import Device, DeviceUnavailable, get_device

CASES_OF_SIZES: tuple[Callable[[Sizes], Iterator[BenchCase]], ...] = (
    store_cases,
    load_cases,
    move_cases,
    run_cases,
    allocator_cases,
    plan_cases,
    bind_cases,
)
GROUPS = (
    *("store", "load", "move", "gather", "scatter"),
    *("allocator", "plan", "bind", "transfer", "handoff"),
)
HANDOFF_ENGINES = ("local",)
"""Whose hand-offs are timed where no engine is named: those of the others take minutes."""


def all_cases(
    sizes: Sizes, engines: Sequence[str], handoff_engines: Sequence[str] = HANDOFF_ENGINES
) -> list[BenchCase]:
    """Every case, whether it can run here or not; transfers for each of `engines`, hand-offs for
    each of `handoff_engines`.
    """
    found = [case for cases in CASES_OF_SIZES for case in cases(sizes)]
    found += transfer_cases(sizes, engines)
    return [*found, *handoff_cases(sizes, handoff_engines)]


@contextmanager
def context_on(device: Device, sizes: Sizes) -> Iterator[BenchContext]:
    """The context for cases of these sizes; ends the processes that they start."""
    peers = PeerReaders(device, memory_bytes(sizes))
    handoffs = DecodeSides(device, max(sizes.handoff_tokens))
    with closing(peers), closing(handoffs):
        yield BenchContext(device, peers.reader, handoffs.side)


def measurable(name: str) -> Device:
    """The device by name. Raises DeviceUnavailable if it is missing or has no memory."""
    device = get_device(name)
    if device.memory_kind == "meta":
        raise DeviceUnavailable(
            f"device {name!r} has no memory to measure. Choose a device with memory, such as cpu."
        )
    return device
