"""MoRI-IO's Python package: what it needs, and an `IOEngine` until nothing that it posted can land.

MoRI has no cancellation, and a read that it calls failed may have parts in flight. Only destroying
the `IOEngine` ends them: that destroys its queue pairs and registrations. So the `IOEngine` stays
inside `MoriIO`, where nothing else refers to it.
"""

from __future__ import annotations

import importlib
import os
import uuid
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from disagg.engines.base import EngineUnavailable, TransferError
from kvpool.extras import install
from kvpool.layout import Slab
from kvpool.layout.types import HOST

TOKEN_BYTES = 16
SPENT = 1024
"""Statuses that are kept after success: MoRI's thread may still be leaving one."""
NO_XGMI = "MORI_DISABLE_AUTO_XGMI"
DEVICES = "MORI_RDMA_DEVICES"


@dataclass(frozen=True, slots=True)
class MoriSettings:
    """How an `IOEngine` is made; the numbers are those of MoRI's `RdmaBackendConfig`."""

    hostname: str
    qp_per_transfer: int
    post_batch_size: int
    num_worker_threads: int


class MoriRuns(NamedTuple):
    """Runs from one of a peer's registrations into one of ours: their bases, and offsets and
    lengths in bytes, `[N]` each.
    """

    src_base: int
    dst_base: int
    src: list[int]
    dst: list[int]
    nbytes: list[int]


class MoriIO:
    """An `IOEngine` with the RDMA backend, where slabs are registered. One thread at a time uses
    it. All methods raise TransferError with MoRI's reason.
    """

    def __init__(self, settings: MoriSettings, slabs: Sequence[Slab]) -> None:
        self.tokens = np.zeros((2, TOKEN_BYTES), dtype=np.uint8)
        """What a peer reads to know that this process answers, and place for a peer's."""
        self.tokens[0] = np.frombuffer(os.urandom(TOKEN_BYTES), dtype=np.uint8)
        self.memory: dict[int, Any] = {}
        self._posted: list[Any] = []
        self._spent: deque[Any] = deque(maxlen=SPENT)
        self._io = _io_engine(settings)
        self._alive = weakref.ref(self._io)
        self.register([Slab(self.token_base, self.tokens.nbytes), *slabs])

    @property
    def token_base(self) -> int:
        """The registration of the tokens."""
        return int(self.tokens.ctypes.data)

    def register(self, slabs: Sequence[Slab]) -> None:
        """Registers memory; `memory` has its `MemoryDesc`s by base."""
        locations = mori_io().MemoryLocationType
        for slab in slabs:
            kind, _, number = slab.memory.partition(":")
            place = (-1, locations.CPU) if kind == HOST else (int(number), locations.GPU)
            action = f"registration of {slab.nbytes} bytes on {slab.memory}"
            desc = self._call(action, "register_memory", slab.base, slab.nbytes, *place)
            self.memory[slab.base] = desc

    def description(self) -> Any:
        """The `EngineDesc`, by which peers find this process."""
        return self._call("description", "get_engine_desc")

    def meet(self, engine: Any) -> None:
        """Makes a peer known by its `EngineDesc`."""
        self._call("peer", "register_remote_engine", engine)

    def post(self, memory: Any, runs: MoriRuns) -> Any:
        """Posts a read from a peer's `MemoryDesc` and returns its `TransferStatus`."""
        number = self._call("number", "allocate_transfer_uid")
        sides = [self.memory[runs.dst_base]], [runs.dst], [memory], [runs.src]
        what = f"read of {len(runs.nbytes)} runs"
        [status] = self._call(what, "batch_read", *sides, [runs.nbytes], [number])
        # MoRI writes to it until the read has succeeded or the IOEngine is destroyed
        self._posted.append(status)
        return status

    def spend(self) -> None:
        """All that was posted has succeeded."""
        self._spent.extend(self._posted)
        self._posted.clear()

    def destroy(self) -> bool:
        """Lets go of the `IOEngine`; True once it is gone, so that no further byte can land."""
        self._io = None
        return self._alive() is None

    def _call(self, action: str, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._io, method)(*arguments)
        except Exception as error:  # of C++, without a type of their own
            reason = str(error)
        # not in the `except`: the traceback of MoRI's error keeps the IOEngine alive
        raise TransferError(f"MoRI's {action}: {reason}")


def _io_engine(settings: MoriSettings) -> Any:
    api = mori_io()
    try:
        key = f"kvpool-{uuid.uuid4().hex}"
        engine = api.IOEngine(key, api.IOEngineConfig(host=settings.hostname, port=0))
        config = api.RdmaBackendConfig(
            settings.qp_per_transfer,
            settings.post_batch_size,
            settings.num_worker_threads,
            api.PollCqMode.POLLING,
            False,  # peers need no notification, and one that fails would fail its read
        )
        engine.create_backend(api.BackendType.RDMA, config)
        return engine
    except Exception as error:  # of C++, without a type of their own
        reason = str(error)
    raise TransferError(f"MoRI cannot start RDMA on {settings.hostname}: {reason}")


def mori_io() -> Any:
    """MoRI's module `mori.io`. Raises EngineUnavailable with the reason."""
    try:
        return importlib.import_module("mori.io")
    except (ImportError, OSError) as error:
        reason = str(error)
    raise EngineUnavailable(
        f"MoRI cannot be loaded: {reason}. It needs a torch for ROCm and, on Debian, apt-get "
        "install libibverbs1 libpci3."
    )


def missing() -> str | None:
    """All that is missing; found without importing a vendor's package."""
    parts = (
        ("an AMD GPU with its driver (/dev/kfd)", _driver()),
        ("a NIC with an active RDMA port (/sys/class/infiniband)", _active_port()),
        (f"MoRI ({install('mori')})", find_spec("mori") is not None),
    )
    absent = [part for part, present in parts if not present]
    return f"missing: {'; '.join(absent)}." if absent else None


def choose(device: str) -> None:
    """Sets what MoRI reads from the environment. Raises EngineUnavailable if it says otherwise."""
    if os.environ.setdefault(NO_XGMI, "1")[:1] in ("", "0"):
        raise EngineUnavailable(
            f"{NO_XGMI}={os.environ[NO_XGMI]}: MoRI could move bytes over XGMI, and engine mori "
            "knows only how its RDMA reads end. Unset the variable."
        )
    if device and os.environ.setdefault(DEVICES, device) != device:
        raise EngineUnavailable(
            f"device={device!r}: {DEVICES}={os.environ[DEVICES]} is set, and a process has one "
            "choice of NICs. Unset the variable, or give both the same value."
        )


def _driver() -> bool:
    return Path("/dev/kfd").exists()


def _active_port() -> bool:
    states = Path("/sys/class/infiniband").glob("*/ports/*/state")
    return any("ACTIVE" in state.read_text() for state in states)
