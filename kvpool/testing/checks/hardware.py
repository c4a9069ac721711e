"""Checks of what only some devices have: queues of work, CUDA graphs, and memory that another
process maps, as engine `local` and staging buffers do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from kvpool.device import Device, DeviceUnavailable, IpcHandle, Sharing, get_device
from kvpool.process import OtherProcess
from kvpool.testing.case import fail, raises, random_of
from kvpool.testing.memory import DeviceMemory, same, settle
from kvpool.testing.pools import POOLS

Work = Callable[[], object]
# products of square float32 matrices, which take an accelerator many milliseconds
LONG_SIDE, LONG_ROUNDS = 4096, 60
STREAM_POOLS = ("mha bf16", "mla fp8", "dsv4 fp8")
REPLAYS = 3
GRAPH_POOLS = ("mha bf16", "mha hnd fp8", "mla fp8", "mha mxfp8")
NBYTES = 1 << 20
PART = 4096, 100_003


def no_call_waits_for_the_device(device: Device) -> None:
    """Writes, reads, copies and waits return while earlier work runs."""
    memory = device.allocate(1).device
    with torch.get_device_module(memory).device(memory):
        occupy = _long_work(device)
        for pool in STREAM_POOLS:
            calls_return_at_once(device, pool, occupy)


def a_stream_that_waits_for_an_event_sees_earlier_writes(device: Device) -> None:
    """3 of 3 writes behind long work are seen by a stream that waits for their event."""
    memory = device.allocate(1).device
    streams = torch.get_device_module(memory)
    with streams.device(memory):  # new streams are of the current device
        reads_see_writes(device, streams, _long_work(device))


def captured_work_replays(device: Device) -> None:
    """3 of 3 replays write, read and copy what they do on a pool of the host."""
    with torch.cuda.device(device.allocate(1).device):  # captures are of the current device
        for pool in GRAPH_POOLS:
            work_replays(device, pool, _captured)


def another_process_maps_memory(device: Device) -> None:
    """Another process reads all bytes of an allocation, and of a part of one, and unmaps them."""
    memory = DeviceMemory.filled(device, random_of("shared"), NBYTES)
    settle(device)
    with OtherProcess(Mapper, device.name) as process:
        for start, nbytes in ((0, NBYTES), PART):
            handle = cast("Sharing", device).share(memory.tensors[0].data_ptr() + start, nbytes)
            mapped = np.frombuffer(process.call("read", handle, nbytes), dtype=np.uint8)
            same("memory in another process", mapped, memory.bytes[start : start + nbytes])


def what_is_no_handle_is_refused(device: Device) -> None:
    """`attach` raises DeviceUnavailable."""
    attach = cast("Sharing", device).attach
    raises(DeviceUnavailable, "bytes that are no handle", lambda: attach(b"no handle"))


class HardwareChecks(NamedTuple):
    """Checks of what only some devices have; `otherwise` says why another has it not."""

    name: str
    title: str
    has: Callable[[Device], bool]
    otherwise: str
    checks: tuple[Callable[[Device], None], ...]

    def unfit(self, device: Device) -> str | None:
        """Why the checks are not for a device, or None."""
        return None if self.has(device) else f"not for this device: {self.otherwise}"


HARDWARE_CHECKS = (
    HardwareChecks(
        name="streams",
        title="work on streams is ordered by events and never waits",
        has=lambda device: device.allocate(1).device.type != "cpu",
        otherwise="its calls end before they return.",
        checks=(no_call_waits_for_the_device, a_stream_that_waits_for_an_event_sees_earlier_writes),
    ),
    HardwareChecks(
        name="graphs",
        title="captured writes, reads and copies replay with new inputs",
        has=lambda device: device.memory_kind == "cuda",
        otherwise="kvpool captures CUDA graphs only.",
        checks=(captured_work_replays,),
    ),
    HardwareChecks(
        name="ipc",
        title="another process maps the device's memory",
        has=lambda device: isinstance(device, Sharing),
        otherwise="it has no `share` and no `attach`.",
        checks=(another_process_maps_memory, what_is_no_handle_is_refused),
    ),
)


def _long_work(device: Device) -> Work:
    """Queues work that takes a while. The first call is made here: it loads libraries."""
    side = torch.zeros(LONG_SIDE, LONG_SIDE, device=device.allocate(1).device)
    product = torch.empty_like(side)

    def work() -> None:
        for _ in range(LONG_ROUNDS):
            torch.mm(side, side, out=product)

    torch.mm(side, side, out=product)
    settle(device)
    return work


def calls_return_at_once(device: Device, name: str, occupy: Work) -> None:
    """Fails if a call on a pool of the kit returns only after the work that `occupy` queues."""
    pool = POOLS[name](device=device.name)
    layout = pool.layout
    region = next(r for r in layout.regions if r.layer == 1 and not r.role.endswith(".scale"))
    view = pool.view(region.role, 1)
    locations = torch.tensor([9, 5], device=view.device)
    values = torch.randn(2, *view.shape[2:], device=view.device, dtype=torch.bfloat16)
    if region.dtype not in ("bfloat16", "float8_e4m3fn"):
        values = values.to(view.dtype)
    id_list = layout.space_of(region).id_list
    ids, swapped = (torch.tensor(pair, device=view.device) for pair in ([1, 2], [2, 1]))
    buffer = layout.buffer_of(region)
    low, high = buffer.base + buffer.item_stride, buffer.base + 2 * buffer.item_stride
    calls: dict[str, Work] = {
        "write": lambda: pool.write(1, locations, {region.role: values}),
        "read": lambda: pool.read_roles((region.role,), 1, locations),
        "copy_items": lambda: pool.copy_items(id_list, ids, swapped),
        "copy_runs": lambda: device.copy_runs(np.array([low]), np.array([high]), np.array([64])),
        "wait": lambda: device.wait(device.record()),
    }
    for call in calls.values():  # compiles
        call()
    settle(device)
    for what, call in calls.items():
        occupy()
        event = device.record()
        if event.query():
            fail("the work that was to keep the device busy had ended at once.")
        call()
        waited = event.query()
        event.synchronize()
        if waited:
            fail(f"pool {name}: {what} returned only after the work that was queued before it.")


def reads_see_writes(device: Device, streams: Any, occupy: Work) -> None:
    """Writes on one stream, reads on another that waits for the write's event."""
    pool = POOLS["mha bf16"](device=device.name)
    memory = pool.view("k", 2)
    location = torch.tensor([7], device=memory.device)
    values = torch.randn(1, *memory.shape[2:], device=memory.device).bfloat16()
    writer, reader = streams.Stream(), streams.Stream()
    for number in range(1, 4):
        written = values * number
        settle(device)
        with streams.stream(writer):
            occupy()
            pool.write(2, location, {"k": written})
            event = device.record()
        with streams.stream(reader):
            device.wait(event)
            read = pool.read("k", 2, location)
            settle(device)
        if not torch.equal(read.cpu(), written.cpu()):
            fail(f"write {number} of 3: the other stream read what was there before.")


def _captured(work: Work) -> Work:
    """What replays work: a CUDA graph, captured after a run on another stream that compiles it."""
    cuda: Any = torch.cuda
    aside = cuda.Stream()
    aside.wait_stream(cuda.current_stream())
    with cuda.stream(aside):
        work()
    cuda.current_stream().wait_stream(aside)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        work()
    replay: Work = graph.replay
    return replay


def work_replays(device: Device, name: str, capture: Callable[[Work], Work]) -> None:
    """Captured work, with other ids and values in every replay, against a pool on the host."""
    pool, reference = POOLS[name](device=device.name), POOLS[name](device="cpu")
    roles = ("latent", "rope") if name.startswith("mla") else ("k", "v")
    memory = pool.view(roles[0], 1).device
    locations, src, dst = (
        torch.arange(count, device=memory).add_(first) for count, first in ((6, 0), (2, 1), (2, 2))
    )
    values = {
        role: torch.zeros(6, *pool.view(role, 1).shape[2:], dtype=torch.bfloat16, device=memory)
        for role in roles
    }
    reads: list[torch.Tensor] = []

    def work() -> None:
        pool.write(1, locations, values)
        pool.copy_items("kv", src, dst)
        reads[:] = pool.read_roles(roles, 1, locations)

    replay = capture(work)
    for buffer in pool.layout.buffers:
        pool.item_bytes_view(buffer).zero_()
    random = torch.Generator().manual_seed(0)
    for number in range(1, REPLAYS + 1):
        locations.copy_(torch.randperm(30, generator=random)[:6])
        src.copy_(torch.randperm(9, generator=random)[:2])
        dst.copy_(src.flip(0))
        for tensor in values.values():
            tensor.copy_(torch.randn(tensor.shape, generator=random))
        reference.write(1, locations.cpu(), {role: row.cpu() for role, row in values.items()})
        reference.copy_items("kv", src.cpu(), dst.cpu())
        replay()
        subject = f"pool {name}, replay {number} of {REPLAYS}"
        for role, read in zip(roles, reads):
            if not torch.equal(read.cpu(), reference.read(role, 1, locations.cpu())):
                fail(f"{subject}: {role} is not what was written.")
        for buffer, expected in zip(pool.layout.buffers, reference.layout.buffers):
            items = pool.item_bytes_view(buffer).cpu()
            if not torch.equal(items, reference.item_bytes_view(expected)):
                fail(f"{subject}: items of buffer {buffer.name} are not as written and copied.")


class Mapper:
    """The other process."""

    def __init__(self, device: str) -> None:
        self._device = get_device(device)

    def read(self, handle: IpcHandle, nbytes: int) -> bytes:
        """Maps memory, copies it to memory of its own, and returns the bytes."""
        copy = self._device.allocate(nbytes)
        mapped = cast("Sharing", self._device).attach(handle)
        src, dst = np.array([mapped.base]), np.array([copy.data_ptr()])
        self._device.copy_runs(src, dst, np.array([nbytes]))
        settle(self._device)
        contents = copy.cpu().numpy().tobytes()
        mapped.close()
        mapped.close()  # a second call does nothing
        return contents
