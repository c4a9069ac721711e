"""Reads between Ascend NPUs through Mooncake's Ascend transport.

Written from Mooncake's documentation and sources; not yet run on an NPU (docs/engines.md).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from disagg.engines.base import EngineUnavailable, TransferError, one_memory
from disagg.engines.mooncake.engine import MooncakeEngine
from kvpool.extras import absent, ascend_parts
from kvpool.layout import Slab

ALIGNMENT = 2 << 20
TRANSPORT = b"AscendDirectTransport"
"""A symbol that only Mooncake's Ascend build contains."""


class AscendEngine(MooncakeEngine):
    """Memory of one NPU. An NPU has one `TransferEngine`, which reads all peers. After a failed
    read `fence` raises TransferError, and its pages stay in quarantine.
    """

    name = "ascend"
    protocols = ("ascend",)
    shared = True
    token_bytes = 0  # it would be host memory, which this transport does not register
    max_regions = 256

    def __init__(self, hostname: str | None = None, chunk: int | None = None) -> None:
        if chunk is not None and chunk % ALIGNMENT:
            raise ValueError(f"chunk={chunk}: must be a multiple of 2 MiB ({ALIGNMENT}).")
        reason = self.availability()
        if reason is not None:
            raise EngineUnavailable(f"engine ascend: {reason}")
        super().__init__("ascend", hostname, chunk=chunk)
        self._memory = ""

    @classmethod
    def availability(cls) -> str | None:
        """All that is missing; found without importing a vendor's package."""
        parts = {**ascend_parts(), "a Mooncake that was built with USE_ASCEND_DIRECT": _transport()}
        return absent(parts) or super().availability()

    def _check(self, slabs: Sequence[Slab]) -> None:
        for slab in slabs:
            if not slab.memory.startswith("npu:"):
                raise TransferError(
                    f"slab of {slab.nbytes} bytes on {slab.memory}: engine ascend moves NPU memory "
                    "only. Use engine mooncake or nixl."
                )
            if slab.base % ALIGNMENT:
                raise TransferError(
                    f"slab of {slab.nbytes} bytes at {slab.base:#x} on {slab.memory} does not "
                    "start at a multiple of 2 MiB. Allocate 2 MiB more, and start at one."
                )
        self._memory = one_memory(slabs, self._memory)

    def _scope(self) -> AbstractContextManager[Any]:
        """Every thread sets the device before it calls Mooncake."""
        if not self._memory:
            raise TransferError("engine ascend: register memory of an NPU first.")
        npu: Any = importlib.import_module("torch_npu").npu
        scope: AbstractContextManager[Any] = npu.device(int(self._memory.partition(":")[2]))
        return scope


def _transport() -> bool:
    package = find_spec("mooncake")
    places = package.submodule_search_locations if package else None
    libraries = [file for place in places or () for file in Path(place).glob("*engine*.so*")]
    return any(TRANSPORT in file.read_bytes() for file in libraries)
