"""The protocol that every device keeps, and the registry through which one is asked for by name.

`cpu` and `meta` lie in `kvpool.device.cpu`; other devices join by entry point `kvpool.devices` and
are imported only when one is asked for. `docs/add-a-device.md` adds one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvpool.layout.grid import Ints

if TYPE_CHECKING:
    import torch

    from kvpool.device.torch_ops import Held, Row


class DeviceUnavailable(RuntimeError):
    """The device that was asked for is not there; the message says what is missing."""


class Event(Protocol):
    """A point in a device's work; torch's events are such marks."""

    def query(self) -> bool:
        """Whether all work up to it has ended."""

    def synchronize(self) -> None:
        """Waits, on the host, until it has."""


class Device(Protocol):
    """What a pool needs of a device. Tensors are torch tensors on it; views are strided and typed,
    `[item, entry, ...]`; locations are int64 `[N]`, `item * entries + entry`, and not checked.

    Work is queued in the order of the calls, on the device's current stream if it has streams.
    """

    name: str
    """As it was asked for: `cuda:0`."""
    memory_kind: str
    """What layouts call its memory, without a number: `cuda`."""
    alignment: int
    """Bytes; bases are multiples of it."""
    registration_limit: int | None
    """How many stretches of memory an engine may register at once, where that is bounded."""

    def availability(self) -> str | None:
        """None if the device can be used, else what is missing."""

    def allocate(self, nbytes: int, alignment: int | None = None) -> torch.Tensor:
        """A zeroed uint8 tensor `[nbytes]`, its base at a multiple of `alignment` bytes (default:
        the device's).
        """

    def store(self, view: torch.Tensor, locations: torch.Tensor, values: torch.Tensor) -> None:
        """Writes `values` `[N, ...]` of the view's dtype."""

    def load(self, view: torch.Tensor, locations: torch.Tensor) -> torch.Tensor:
        """Reads entries into a new tensor `[N, ...]`."""

    def quantize_store(
        self,
        view: torch.Tensor,
        scales: torch.Tensor,
        locations: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Writes floats `[N, ..., D]` as e4m3 or int8 to `view`, and to `scales`
        `[item, entry, ..., S]`, float32, float16 or ue8m0, what they are to be multiplied with, one
        for each of S blocks: the bytes that `kvpool.device.quant.quantise` makes.
        """

    def store_rows(self, rows: Sequence[Row], locations: torch.Tensor) -> None:
        """Writes all that one write gives: in one launch, where the device can."""

    def load_rows(self, rows: Sequence[Held], locations: torch.Tensor) -> list[torch.Tensor]:
        """Reads all that one read takes, each into a new tensor `[N, ...]`: in one launch, where
        the device can. What `quantize_store` wrote becomes floats of the row's dtype.
        """

    def copy_items(
        self,
        views: Sequence[torch.Tensor],
        src: torch.Tensor,
        dst: torch.Tensor,
        disjoint: bool = False,
    ) -> None:
        """Copies items `src` `[N]` of each of `views`, uint8 `[item, byte]`, to items `dst` `[N]`.

        Sources are read before anything is written; `disjoint` says that no item is both.
        """

    def copy_runs(self, src: Ints, dst: Ints, nbytes: Ints) -> None:
        """Copies `nbytes` bytes from each address `src` to each address `dst`, `[N]`, all of them
        this device's. No run may overlap what another writes.
        """

    def record(self) -> Event:
        """A mark after all work that was queued so far."""

    def wait(self, event: Event) -> None:
        """Work queued from now on waits for the mark; the host does not, where it need not."""


class Mapping(Protocol):
    """Another process's memory, as long as it is mapped here."""

    base: int
    """Address here."""
    nbytes: int

    def close(self) -> None:
        """Unmaps it, once nothing uses it."""


@runtime_checkable
class Sharing(Protocol):
    """What a device can do besides if its memory can be mapped by other processes of the host."""

    def share(self, base: int, nbytes: int) -> bytes:
        """What another process needs to map `nbytes` at address `base`, which live as long as their
        tensor. Raises DeviceUnavailable with the reason.
        """

    def attach(self, told: bytes) -> Mapping:
        """Maps what another process's `share` returned (untrusted). Raises DeviceUnavailable."""

    def copy_runs(self, src: Ints, dst: Ints, nbytes: Ints) -> None:
        """See Device."""

    def record(self) -> Event:
        """See Device."""


def device_entries() -> dict[str, EntryPoint]:
    """Devices that some installed package offers, by kind; none is imported."""
    return {entry.name: entry for entry in entry_points(group="kvpool.devices")}


@lru_cache
def get_device(name: str) -> Device:
    """The device that `name` (`cpu`, `cuda:0`, `npu:3`, `meta`) asks for, or DeviceUnavailable with
    the reason.
    """
    kind = name.partition(":")[0]
    known = device_entries()
    if kind not in known:
        raise DeviceUnavailable(
            f"device {name!r}: no installed package offers {kind!r} (installed: "
            f"{', '.join(sorted(known)) or 'none'}). "
            "A device joins by an entry point of the group kvpool.devices."
        )
    try:
        device: Device = known[kind].load()(name)
    except ImportError as error:
        raise DeviceUnavailable(f"device {name!r}: its package cannot be loaded: {error}") from None
    reason = device.availability()
    if reason is not None:
        raise DeviceUnavailable(f"device {name!r}: {reason}")
    return device
