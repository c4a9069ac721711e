"""All cases, by group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from disagg.cli.bench.case import BenchCase, BenchContext, Sizes
from disagg.cli.bench.handoff.cases import handoff_cases
from disagg.cli.bench.handoff.decode import timed_hand_offs
from disagg.cli.bench.moves import move_cases, run_cases
from disagg.cli.bench.peer import peer_readers
from disagg.cli.bench.stores import load_cases, store_cases
from disagg.cli.bench.transfers import memory_bytes, transfer_cases
from kvpool.device import Device

GROUPS = ("store", "load", "move", "gather", "scatter", "transfer", "handoff")
HANDOFF_ENGINES = ("local",)
"""Whose hand-offs are timed where no engine is named: those of the others take minutes."""


def all_cases(
    sizes: Sizes, engines: Sequence[str], handoff_engines: Sequence[str] = HANDOFF_ENGINES
) -> list[BenchCase]:
    """Every case, whether it can run here or not; transfers for each of `engines`, hand-offs for
    each of `handoff_engines`.
    """
    return [
        *(
            case
            for cases in (store_cases, load_cases, move_cases, run_cases)
            for case in cases(sizes)
        ),
        *transfer_cases(sizes, engines),
        *handoff_cases(sizes, handoff_engines),
    ]


@contextmanager
def context_on(device: Device, sizes: Sizes) -> Iterator[BenchContext]:
    """The context for cases of these sizes; ends the processes that they start."""
    readers = peer_readers(device, memory_bytes(sizes))
    handoffs = timed_hand_offs(device, max(sizes.handoff_tokens))
    with closing(readers), closing(handoffs):
        yield BenchContext(device, readers, handoffs)
