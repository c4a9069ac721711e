"""MoRI-IO's Python package: what it needs, and an `IOEngine` until nothing that it posted can land.

MoRI has no cancellation, and a read that it calls failed may have parts in flight. Only destroying
the `IOEngine` ends them: that destroys its queue pairs and registrations. So the `IOEngine` stays
inside `MoriIO`, where nothing else refers to it.
"""

from __future__ import annotations

import importlib
import os
import threading
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
PEERS = 4096
"""Peers that have a place of their own for the token that is read from them."""
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

    dst_base: int
    src_base: int
    dst: list[int]
    src: list[int]
    nbytes: list[int]


class MoriIO:
    """An `IOEngine` with the RDMA backend, made by `start`. Any thread may `start` and `read`; the
    calls may take seconds. All raise TransferError with MoRI's reason.
    """

    def __init__(self, settings: MoriSettings, slabs: Sequence[Slab]) -> None:
        self.key = f"kvpool-{uuid.uuid4().hex}"
        self.memory: dict[int, Any] = {}
        self._settings, self._slabs = settings, list(slabs)
        self._tokens = np.zeros((1 + PEERS, TOKEN_BYTES), dtype=np.uint8)
        self._tokens[0] = np.frombuffer(os.urandom(TOKEN_BYTES), dtype=np.uint8)
        self._io: Any = None
        self._alive: weakref.ref[Any] | None = None
        self._started = self._ended = False
        self._met: dict[str, Any] = {}
        self._spent: deque[Any] = deque(maxlen=SPENT)
        self._lock = threading.Lock()

    @property
    def token(self) -> bytes:
        """What a peer reads at `token_base` to know that this process answers."""
        return bytes(self._tokens[0])

    @property
    def token_base(self) -> int:
        """The registration that begins with the token."""
        return int(self._tokens.ctypes.data)

    def start(self) -> None:
        """Makes the `IOEngine` and registers all memory, once."""
        with self._lock:
            if self._ended:
                raise TransferError("the peer was given up.")
            if not self._started:
                self._io = self._made()
                self._alive = weakref.ref(self._io)
                tokens = Slab(self.token_base, self._tokens.nbytes)
                for slab in (tokens, *self._slabs):
                    self._register(slab)
                self._started = True

    def register(self, slabs: Sequence[Slab]) -> None:
        """Registers more memory."""
        with self._lock:
            self._slabs.extend(slabs)
            for slab in slabs if self._started else ():
                self._register(slab)

    def description(self) -> Any:
        """The `EngineDesc`, by which peers find this process."""
        return self._call("description", "get_engine_desc")

    def read(self, engine: Any, memory: dict[int, Any], runs: MoriRuns) -> Any:
        """Posts a read of a peer's memory and returns its `TransferStatus`, which must be kept
        until it succeeds or the `IOEngine` is destroyed: MoRI writes to it. `engine` is the peer's
        `EngineDesc`, `memory` its `MemoryDesc` by base. If this raises, nothing was posted.
        """
        if engine.key not in self._met:
            self._call("peer", "register_remote_engine", engine)
            self._met[engine.key] = engine
        if self._met[engine.key] != engine:
            raise TransferError(f"two peers have MoRI's key {engine.key[:100]!r}. Restart one.")
        here, there = self.memory[runs.dst_base], memory[runs.src_base]
        number = self._call("number", "allocate_transfer_uid")
        rows = [here], [runs.dst], [there], [runs.src], [runs.nbytes], [number]
        [status] = self._call(f"read of {len(runs.nbytes)} runs", "batch_read", *rows)
        return status

    def read_token(self, slot: int, base: int) -> MoriRuns:
        """The read of a peer's token into the place of peer number `slot`."""
        at = TOKEN_BYTES * (1 + slot % PEERS)
        return MoriRuns(self.token_base, base, [at], [0], [TOKEN_BYTES])

    def token_of(self, slot: int) -> bytes:
        """The token that was read from peer number `slot`."""
        return bytes(self._tokens[1 + slot % PEERS])

    def spend(self, statuses: Sequence[Any]) -> None:
        """Takes statuses of reads that have succeeded."""
        self._spent.extend(statuses)

    def destroy(self) -> bool:
        """Lets go of the `IOEngine`; True once it is gone, so that no further byte can land. It is
        not while a thread is in one of its calls.
        """
        with self._lock:
            self._ended, self._io = True, None
        return self._alive is None or self._alive() is None

    def _made(self) -> Any:
        api, settings = mori_io(), self._settings
        try:
            made = api.IOEngine(self.key, api.IOEngineConfig(host=settings.hostname, port=0))
            config = api.RdmaBackendConfig(
                settings.qp_per_transfer,
                settings.post_batch_size,
                settings.num_worker_threads,
                api.PollCqMode.POLLING,
                False,  # peers need no notification, and one that fails would fail its read
            )
            made.create_backend(api.BackendType.RDMA, config)
            return made
        except Exception as error:  # of C++, without a type of their own
            reason = str(error)
        raise TransferError(f"MoRI cannot start RDMA on {settings.hostname}: {reason}")

    def _register(self, slab: Slab) -> None:
        where = mori_io().MemoryLocationType
        kind, _, number = slab.memory.partition(":")
        place = (-1, where.CPU) if kind == HOST else (int(number), where.GPU)
        what = f"registration of {slab.nbytes} bytes on {slab.memory}"
        self.memory[slab.base] = self._call(what, "register_memory", slab.base, slab.nbytes, *place)

    def _call(self, what: str, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._io, method)(*arguments)
        except Exception as error:  # of C++, without a type of their own
            reason = str(error)
        # not in the `except`: the traceback of MoRI's error keeps the IOEngine alive
        raise TransferError(f"MoRI's {what}: {reason}")


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
    absent = [what for what, there in parts if not there]
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
