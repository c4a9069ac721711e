"""The protocol of a device, and the registry that finds one by name.

Devices are found by entry points of the group `kvpool.devices` and imported on first use: `cpu` is
in `kvpool.device.cpu`, `meta` in `kvpool.device.host`. `docs/add-a-device.md` shows how to add one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvpool.extras import missing
from kvpool.layout.grid import Ints
from kvpool.layout.text import nearest

if TYPE_CHECKING:
    import torch

    from kvpool.device.rows_at import ScaledRowsAt
    from kvpool.device.torch_ops import ReadRow, Views, WriteRow


class DeviceUnavailable(RuntimeError):
    """The requested device cannot be used; the message says what is missing."""


class Event(Protocol):
    """A point in a device's queue of work. Events of torch (CUDA, NPU) have these methods."""

    def query(self) -> bool:
        """Whether all work before it has finished."""

    def synchronize(self) -> None:
        """Blocks the host until all work before it has finished."""


class Device(Protocol):
    """What a pool needs of a device. Views are strided, typed tensors `[item, entry, ...]` on the
    device. Locations are int64 `[N]`, `item * entries + entry`, and not checked.

    Calls run in order, on the device's current stream if it has streams.
    """

    name: str
    """The requested name: `cuda:0`."""
    memory_kind: str
    """The kind of memory in layouts, without a number: `cuda`."""
    alignment: int
    """In bytes: allocations start at multiples of it."""
    registration_limit: int | None
    """How many memory regions an engine can register at once; None: no known limit."""
    emulated: bool
    """Whether host code does the work of other hardware: slow, and its speed says nothing."""

    def availability(self) -> str | None:
        """None if the device can be used, else a sentence that says what is missing."""

    def allocate(self, nbytes: int, alignment: int | None = None) -> torch.Tensor:
        """A zeroed uint8 tensor `[nbytes]` at a multiple of `alignment` bytes (None: its own)."""

    def store_rows(self, rows: Sequence[WriteRow], locations: torch.Tensor) -> None:
        """Writes every row at the same locations, in one launch where the device can.

        With scales, floats `[N, ..., D]` are stored as e4m3 or int8 and their scales as float32,
        float16 or ue8m0, one scale a block: the bytes that `kvpool.device.quant.quantise` makes.
        """

    def load_rows(self, rows: Sequence[ReadRow], locations: torch.Tensor) -> list[torch.Tensor]:
        """Reads every row at the same locations, in one launch where the device can; returns a new
        tensor `[N, ...]` for each, with scales the dequantised floats.
        """

    def copy_items(
        self, views: Views, src: torch.Tensor, dst: torch.Tensor, disjoint: bool = False
    ) -> None:
        """Copies items `src` `[N]` of each of `views`, uint8 `[item, byte]`, to items `dst` `[N]`.

        All sources are read before anything is written; with `disjoint` no item is in both.
        """

    def copy_runs(self, src: Ints, dst: Ints, nbytes: Ints) -> None:
        """Copies `nbytes` bytes from each pointer `src` to each pointer `dst`, `[N]`, all in this
        device's memory. No run may overlap the destination of another.
        """

    def record(self) -> Event:
        """An event after all work queued so far."""

    def wait(self, event: Event) -> None:
        """Work queued from now on waits for the event, without blocking the host if possible."""


IpcHandle = bytes
"""Opaque bytes with which another process of the host maps device memory."""


class MappedMemory(Protocol):
    """Memory of another process, mapped into this one."""

    base: int
    """Pointer in this process."""
    nbytes: int

    def close(self) -> None:
        """Unmaps it. No work that uses it may be queued."""


@runtime_checkable
class Sharing(Protocol):
    """A device whose memory other processes can map; its `copy_runs` takes mapped pointers too."""

    def share(self, base: int, nbytes: int) -> IpcHandle:
        """A handle of `nbytes` bytes at pointer `base`, valid while their tensor lives. Raises
        DeviceUnavailable if they cannot be shared.
        """

    def attach(self, handle: IpcHandle) -> MappedMemory:
        """Maps memory from another process's handle (untrusted). Raises DeviceUnavailable."""

    def copy_runs(self, src: Ints, dst: Ints, nbytes: Ints) -> None:
        """See Device."""

    def record(self) -> Event:
        """See Device."""


@runtime_checkable
class Pointing(Protocol):
    """A device that finds the memory at a pointer, which conversions there need."""

    def memory_at(self, pointer: int, nbytes: int) -> torch.Tensor:
        """That memory, uint8 `[nbytes]`. Raises DeviceUnavailable where it can make no tensor."""


@runtime_checkable
class Converting(Protocol):
    """A device that stores rows at its pointers in another format in one call."""

    def convert_rows(
        self, pairs: Sequence[tuple[ScaledRowsAt, ScaledRowsAt]], read: Ints, write: Ints
    ) -> bool:
        """As `kvpool.device.conversion.convert_rows`, with the same bytes; False, and nothing is
        done, for rows that it cannot convert.
        """


OTHER_NAMES = {"gpu": "cuda", "nvidia": "cuda", "ascend": "npu", "host": "cpu"}
"""Kinds by other names that users give them."""


def device_entries() -> dict[str, EntryPoint]:
    """Entry points of the installed devices, by kind; none is imported."""
    return {entry.name: entry for entry in entry_points(group="kvpool.devices")}


@lru_cache
def get_device(name: str) -> Device:
    """The device called `name`, as `cuda:0`. Raises DeviceUnavailable with the reason."""
    kind = name.partition(":")[0]
    entries = device_entries()
    if kind not in entries:
        raise DeviceUnavailable(
            f"device {name!r}: no installed package offers {kind!r} (installed: "
            f"{', '.join(sorted(entries)) or 'none'}).{_suggestion(name, entries)} "
            "A package adds a device by an entry point of the group kvpool.devices."
        )
    try:
        device: Device = entries[kind].load()(name)
    except ImportError as error:
        absent = missing(f"device {name!r}", error)
        broken = f"device {name!r}: its package cannot be loaded: {error}"
        raise DeviceUnavailable(broken if absent is error else str(absent)) from None
    except Exception as error:  # of a package that is not ours
        broken = f"its package cannot be loaded: {type(error).__name__}: {error}"
        raise DeviceUnavailable(f"device {name!r}: {broken}") from None
    reason = device.availability()
    if reason is not None:
        raise DeviceUnavailable(f"device {name!r}: {reason}")
    return device


def _suggestion(name: str, known: Collection[str]) -> str:
    """` Did you mean 'cuda:0'?`, of a device whose kind is not known; empty if none is meant."""
    kind, colon, number = name.lower().partition(":")
    hardware = OTHER_NAMES.get(kind, kind)
    if hardware in known:
        return f" Did you mean {hardware + colon + number!r}?"
    # an unknown kind of hardware is as like another kind as its misspelling: tpu and npu
    return nearest(kind, [candidate for candidate in known if candidate[0] == kind[:1]])
