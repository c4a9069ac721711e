"""NIXL: RDMA, NVLink, TCP or shared memory through UCX and other backends.

Facts relied on (docs/engines.md): without its progress thread an agent burns no core, and whoever
is read must then make progress himself; errors are raised; there is no time-out.
"""

from __future__ import annotations

import importlib
import logging
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from disagg.bind import CopyBatch
from disagg.engines.base import Engine, TransferError
from kvpool.layout import Slab

PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")


@dataclass(eq=False)
class Peer:
    """A remote agent, and the handles of reads from it that are not done."""

    agent: str
    handles: list[Any]


@dataclass(eq=False)
class Transfer:
    """One posted request."""

    peer: Peer
    handle: Any


class NixlEngine(Engine):
    """One NIXL agent with one backend; `options` go to the backend as they are."""

    name = "nixl"

    def __init__(self, backend: str = "UCX", **options: str) -> None:
        api = _api()
        self._errors = _errors(api)
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent = api.nixl_agent(uuid.uuid4().hex, config)
        try:
            self._agent.create_backend(backend, options)
        except self._errors as error:
            raise TransferError(f"NIXL backend {backend} with {options}: {error}") from None
        self._registered: list[Any] = []
        self._peers: list[Peer] = []

    @classmethod
    def availability(cls) -> str | None:
        """The package must be importable."""
        try:
            _api()
        except ImportError as error:
            return f"{error}. Install kvpool[nixl]."
        return None

    def register(self, slabs: Sequence[Slab]) -> None:
        """Registers host slabs."""
        for slab in slabs:
            if slab.memory != "cpu":
                raise TransferError(
                    f"slab of {slab.nbytes} bytes on {slab.memory}: this version's NIXL engine "
                    "moves "
                    "host memory only. Build the pool with device='cpu'."
                )
        rows = [(slab.base, slab.nbytes, 0, "") for slab in slabs]
        try:
            self._registered.append(self._agent.register_memory(rows, "DRAM"))
        except self._errors as error:
            raise TransferError(f"NIXL cannot register {len(rows)} slabs: {error}") from None

    def metadata(self) -> bytes:
        """The agent's metadata."""
        found: bytes = self._agent.get_agent_metadata()
        return found

    def connect(self, metadata: bytes) -> Peer:
        """Loads the peer's metadata."""
        try:
            name = self._agent.add_remote_agent(metadata)
        except self._errors as error:
            raise TransferError(f"NIXL cannot load the peer's metadata: {error}") from None
        peer = Peer(name.decode() if isinstance(name, bytes) else name, [])
        self._peers.append(peer)
        return peer

    def read(self, peer: Peer, batch: CopyBatch) -> Transfer | None:
        """Posts one request for the whole batch."""
        if not batch.runs:
            return None
        rows = np.zeros((2, batch.runs, 3), dtype=np.uint64)
        rows[0, :, 0], rows[1, :, 0] = batch.src, batch.dst
        rows[:, :, 1] = batch.nbytes
        try:
            source, dest = (self._agent.get_xfer_descs(side, "DRAM") for side in rows)
            handle = self._agent.initialize_xfer("READ", dest, source, peer.agent)
            peer.handles.append(handle)
            state = self._agent.transfer(handle)
        except self._errors as error:
            raise TransferError(f"NIXL read of {batch.runs} runs: {error}") from None
        transfer = Transfer(peer, handle)
        self._settle(transfer, state)
        return transfer

    def poll(self, transfer: Transfer | None) -> bool:
        """Asks the agent."""
        if transfer is None or transfer.handle is None:
            return True
        try:
            state = self._agent.check_xfer_state(transfer.handle)
        except self._errors as error:
            raise TransferError(f"NIXL read: {error}") from None
        return self._settle(transfer, state)

    def progress(self) -> None:
        """Polls for notifications, which drives the transports."""
        self._agent.get_new_notifs()

    def fence(self, peer: Peer, timeout: float | None = None) -> bool:
        """Cancels what is not done and disconnects."""
        while peer.handles:
            self._release(peer, peer.handles[-1])
        if peer in self._peers:
            self._peers.remove(peer)
            if any(other.agent == peer.agent for other in self._peers):
                return True  # another link to the same agent lives on
            try:
                self._agent.remove_remote_agent(peer.agent)
            except self._errors as error:
                raise TransferError(f"NIXL cannot disconnect: {error}") from None
        return True

    def close(self) -> None:
        """Fences all peers and deregisters all memory."""
        for peer in list(self._peers):
            self.fence(peer)
        while self._registered:
            self._agent.deregister_memory(self._registered.pop())

    def _settle(self, transfer: Transfer, state: str) -> bool:
        if state == "ERR":
            raise TransferError("NIXL read: the backend reports an error.")
        if state != "DONE":
            return False
        self._release(transfer.peer, transfer.handle)
        transfer.handle = None
        return True

    def _release(self, peer: Peer, handle: Any) -> None:
        try:
            self._agent.release_xfer_handle(handle)
        except self._errors as error:
            raise TransferError(f"NIXL cannot cancel a read: {error}") from None
        peer.handles.remove(handle)


def _api() -> Any:
    """NIXL's Python module, under whichever name its wheel gave it."""
    if not any(Path("/sys/class/infiniband").glob("*")):
        # UCX's InfiniBand modules bring a second libnl, which can crash the process at exit
        os.environ.setdefault("UCX_MODULES", "^ib")
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    for package in PACKAGES:
        try:
            api = importlib.import_module(f"{package}._api")
            logging.getLogger("nixl").setLevel(
                logging.WARNING
            )  # it announces every agent on stdout
            return api
        except ImportError as error:
            reason = error
    raise ImportError(f"none of {', '.join(PACKAGES)} can be imported ({reason})")


def _errors(api: Any) -> tuple[type[Exception], ...]:
    """NIXL's exceptions, which share no base of their own."""
    known = vars(api.nixlBind).values()
    return tuple(e for e in known if isinstance(e, type) and issubclass(e, Exception))
