"""A request's state from one pool of this process to another, in another format."""

from __future__ import annotations

from collections.abc import Collection

from disagg.plan import plan
from disagg.plan.bind import CopyBatch
from disagg.portable.conversion import Converter, WantedRows
from disagg.portable.staging import Staging
from kvpool.device.host_copy import copy_runs
from kvpool.layout import PoolLayout, RequestAddress
from kvpool.layout.request_address import pinned_by_call

STAGING_BYTES = 8 << 20


class PoolConverter:
    """From the pool of `source` to that of `dest`, in memory of one kind. Raises
    IncompatibleLayouts, and DeviceUnavailable.
    """

    def __init__(
        self, source: PoolLayout, dest: PoolLayout, *, cast: bool | Collection[str] = True
    ) -> None:
        self._source, self._dest = source, dest
        self._plan = plan([source], dest, cast=cast)
        self._arrival = Staging(dest, STAGING_BYTES)
        cast_plan = self._plan.cast
        self._converter = None if cast_plan is None else Converter(cast_plan, dest)

    def convert(
        self,
        source: RequestAddress,
        dest: RequestAddress,
        tokens: range | None = None,
        *,
        layers: range | None = None,
        owner: str = "target",
    ) -> None:
        """Copies positions `tokens` (default: all of `dest`) of a request; with `layers`, of these
        of `owner`. Raises as TransferPlan.bind, and RequestPinned.
        """
        positions = range(dest.num_tokens) if tokens is None else tokens
        with (
            pinned_by_call("a conversion", source, self._source, "offered"),
            pinned_by_call("a conversion", dest, self._dest, "received", positions.start),
        ):
            self._copy(
                self._plan.bind(0, source, dest, tokens=positions, layers=layers, owner=owner)
            )
            if self._converter is None:
                return
            wanted = WantedRows(
                source=0,
                source_address=source,
                dest_address=dest,
                tokens=positions,
                layers=layers,
                owner=owner,
            )
            pointer = self._arrival.pointer
            for part in self._converter.parts(wanted, STAGING_BYTES):
                src, dst, nbytes = part.read
                self._copy(CopyBatch(src, dst + pointer, nbytes))
                part.store(pointer).synchronize()

    def _copy(self, batch: CopyBatch) -> None:
        if self._arrival.device is None:
            copy_runs(*batch)
        else:
            self._arrival.device.copy_runs(*batch)
