"""The kit's checks of streams, graphs and shared memory see what is wrong, on devices of the host
that stand for others.
"""

from __future__ import annotations

import time

import pytest
import torch

from kvpool.device import get_device
from kvpool.testing.case import CheckFailure
from kvpool.testing.checks import hardware
from kvpool.testing.run import device_checks
from tests.disagg.cli.accepting import install

SHARING_CHECKS = hardware.HARDWARE_CHECKS[-1].checks


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("devices")
    install(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


def test_a_device_is_checked_for_what_it_has():
    fitting = {name: {g.name for g in hardware.HARDWARE_CHECKS if g.unfit(get_device(name)) is None}
               for name in ("cpu", "handed")}  # fmt: skip
    assert fitting == {"cpu": set(), "handed": {"ipc"}}
    checks = {bound.check for bound in device_checks(get_device("handed"))}
    assert {*SHARING_CHECKS} <= checks


def test_memory_of_a_handle_is_read_by_another_process():
    for check in SHARING_CHECKS:
        check(get_device("handed"))
    with pytest.raises(CheckFailure, match=r"byte 0: .* \(.* differ\)"):
        hardware.another_process_maps_memory(get_device("beyond"))


def busy(device):
    """Queues work on an asynchronous device, far longer than a call takes."""
    return lambda: device.queue(time.sleep, 0.3)


def test_a_call_that_waits_for_the_device_is_named():
    late, waiting = get_device("late"), get_device("waiting")
    hardware.calls_return_at_once(late, "mha bf16", busy(late))
    with pytest.raises(CheckFailure, match="copy_items returned only after the work"):
        hardware.calls_return_at_once(waiting, "mha bf16", busy(waiting))


def test_a_read_behind_an_event_must_see_the_write():
    late, unordered = get_device("late"), get_device("unordered")
    hardware.reads_see_writes(late, torch.cpu, busy(late))
    with pytest.raises(CheckFailure, match="write 1 of 3: the other stream read what was there"):
        hardware.reads_see_writes(unordered, torch.cpu, busy(unordered))


def again(work):
    """In place of a graph: the work itself."""
    work()
    return work


def frozen(work):
    """A graph that replays nothing."""
    work()
    return lambda: None


@pytest.mark.parametrize("pool", hardware.GRAPH_POOLS)
def test_a_replay_must_write_copy_and_read_anew(pool, monkeypatch):
    device = get_device("handed")
    hardware.work_replays(device, pool, again)
    with pytest.raises(CheckFailure, match="replay 1 of 3: "):
        hardware.work_replays(device, pool, frozen)
    monkeypatch.setattr(type(device), "copy_items", lambda *_, **__: None)
    with pytest.raises(CheckFailure, match="replay 1 of 3: "):
        hardware.work_replays(device, pool, again)
