"""A NIXL agent, from its registrations until nothing that it posted can land.

After NIXL's release and disconnect, bytes of reads in flight still land. They stop once the agent
is destroyed; but UCX makes progress while it destroys an agent, so that a whole read which waits in
its sockets lands just then. So only `destroy` destroys an agent that has reads in flight. NIXL's
objects stay inside `Agent`, which hands out numbers for them: an object to which an exception's
traceback refers would keep the agent alive.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from disagg.engines.base import TransferError
from disagg.host.exits import keep_for_ever
from disagg.plan.bind import CopyBatch
from kvpool.layout import Slab
from kvpool.layout.types import HOST

WHEELS = ("nixl_cu12", "nixl_cu13", "nixl")
WITHOUT_ERRORS = {"posix", "sysv", "xpmem", "sm", "shm"}
"""UCX transports that work only with UCX's error handling turned off."""
NEED_PROGRESS = {"tcp", "posix", "sysv", "cma", "sm", "shm", "self"}
"""UCX transports over which no byte lands here unless this side makes progress."""
RDMA_DEVICES = Path("/sys/class/infiniband")

SEGMENTS = {HOST: "DRAM", "cuda": "VRAM"}
DISCONNECTED = "NIXL_ERR_REMOTE_DISCONNECT"
MAX_DEVICE = 1 << 16
MAX_UNUSED_PEERS = 64
"""Peers that nothing is connected to any more and that are kept; beyond, the oldest is removed."""


class NixlMemory(NamedTuple):
    """The name that layouts use, NIXL's segment type, and the device number."""

    name: str
    segment: str
    device: int


READING: set[Agent] = set()
"""Agents that have reads in flight, or reads that were given up: what refers to them no more, the
garbage collector and the end of the interpreter do not destroy them.
"""
keep_for_ever(READING)


class Agent:
    """An agent with one backend. Every method raises TransferError with NIXL's reason."""

    def __init__(self, backend: str, options: Mapping[str, str]) -> None:
        api = nixl_api()
        # its exceptions share no base of their own
        classes = (name for name in vars(api.nixlBind).values() if isinstance(name, type))
        self._errors = tuple(kind for kind in classes if issubclass(kind, Exception))
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._nixl: Any = api.nixl_agent(uuid.uuid4().hex, config)
        self._alive = weakref.ref(self._nixl.agent)
        self._number = count()
        self._held: dict[int, Any] = {}
        self._peers: OrderedDict[str, int] = OrderedDict()
        self._call(f"backend {backend} with {options}", "create_backend", backend, dict(options))

    def register(self, slabs: Sequence[Slab], memory: NixlMemory) -> None:
        """Registers slabs of one memory."""
        action = f"registration of {len(slabs)} slabs on {memory.name}"
        rows = [(slab.base, slab.nbytes, memory.device, "") for slab in slabs]
        self._call(action, "register_memory", rows, memory.segment)

    def metadata(self) -> bytes:
        """What a peer's agent needs to read from this one."""
        metadata: bytes = self._call("metadata", "get_agent_metadata")
        return metadata

    def connect(self, metadata: bytes) -> str:
        """Loads a peer's metadata and returns the name of its agent; calls are counted."""
        name = self._add(metadata)
        if self._peers.get(name) == 0:
            try:
                # fails if the connection that was kept has broken meanwhile
                self._call("connection", "send_notif", name, b"")
            except TransferError:
                self._remove(name)
                name = self._add(metadata)
        self._peers[name] = self._peers.get(name, 0) + 1
        return name

    def _add(self, metadata: bytes) -> str:
        name = self._call("peer's metadata", "add_remote_agent", metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def disconnect(self, name: str) -> None:
        """Undoes one `connect`. After the last one the peer is kept for the next, since removing it
        leaves a socket of UCX open on both sides.
        """
        self._peers[name] -= 1
        self._peers.move_to_end(name)
        unused = [name for name, uses in self._peers.items() if not uses]
        for name in unused[: max(0, len(unused) - MAX_UNUSED_PEERS)]:
            self._remove(name)

    def _remove(self, name: str) -> None:
        del self._peers[name]
        with suppress(TransferError):  # NIXL has forgotten it already
            self._call("disconnection", "remove_remote_agent", name)

    def make_read(self, name: str, batch: CopyBatch, src: NixlMemory, dst: NixlMemory) -> int:
        """A read of a batch from a peer's memory into this side's; it is not posted yet."""
        rows = np.zeros((2, batch.runs, 3), dtype=np.uint64)
        rows[0, :, 0], rows[1, :, 0] = batch.src, batch.dst
        rows[:, :, 1] = batch.nbytes
        rows[0, :, 2], rows[1, :, 2] = src.device, dst.device
        remote = self._call("rows", "get_xfer_descs", rows[0], src.segment)
        local = self._call("rows", "get_xfer_descs", rows[1], dst.segment)
        action = f"read of {batch.runs} runs"
        number = next(self._number)
        self._held[number] = self._call(action, "initialize_xfer", "READ", local, remote, name)
        READING.add(self)
        return number

    def post(self, read: int) -> bool:
        """Starts a read; whether it is already complete. If this raises, bytes may still land."""
        return self._complete(read, self._call("read", "transfer", self._held[read]))

    def complete(self, read: int) -> bool:
        """Whether a read is complete. If this raises, bytes may still land."""
        return self._complete(read, self._call("read", "check_xfer_state", self._held[read]))

    def _complete(self, read: int, state: str) -> bool:
        if state == "PROC":
            return False
        if state != "DONE":
            raise TransferError(f"NIXL read failed: the backend reports state {state}.")
        self.release(read)
        return True

    def release(self, number: int) -> None:
        """Frees a read that is complete or was never posted."""
        read = self._held.pop(number)
        if not self._held:
            READING.discard(self)
        self._call("release", "release_xfer_handle", read)

    def progress(self) -> None:
        """Polls for notifications, which drives UCX's transports."""
        self._call("progress", "get_new_notifs")

    def destroy(self) -> bool:
        """Destroys the agent; True once it is gone, so that no further byte can land."""
        if self._nixl is not None:
            for number in list(self._held):
                with suppress(TransferError):
                    self.release(number)
            for name in list(self._peers):
                self._remove(name)
            self._nixl = None
        if self._alive() is not None:
            gc.collect()
        return self._alive() is None

    def _call(self, action: str, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nixl, method)(*arguments)
        except self._errors as error:
            reason = str(error) or type(error).__name__
        del arguments  # the traceback keeps this frame and the NIXL objects that it names
        if DISCONNECTED in reason:
            reason += ": the peer is dead or out of reach, or has restarted."
        raise TransferError(f"NIXL {action}: {reason}")


def backend_options(
    backend: str,
    options: dict[str, str],
    transport: str | None = None,
    device: str | None = None,
) -> dict[str, str]:
    """The backend's options, with those that select one UCX transport and one network device."""
    config = [options["engine_config"]] if "engine_config" in options else []
    for name, value, key in (("transports", transport, "TLS"), ("device", device, "NET_DEVICES")):
        if value is not None:
            _check_selection(backend, name, value, f"UCX_{key}")
            config.append(f"{key}={value}")
    if not config:
        return options
    handling = {"ucx_error_handling_mode": "none"} if transport in WITHOUT_ERRORS else {}
    return {**handling, **options, "engine_config": ",".join(config)}


def _check_selection(backend: str, name: str, value: str, variable: str) -> None:
    if backend != "UCX" or "," in value:
        raise ValueError(
            f"{name}={value!r} with backend {backend!r}: `{name}` names one of UCX. Set the "
            f"variable {variable} for several; other backends take their own options."
        )
    forced = os.environ.get(variable, value)
    if forced != value:
        raise ValueError(
            f"{name}={value!r} has no effect: the variable {variable}={forced} overrides it."
        )


def lands_by_progress(
    backend: str, options: Mapping[str, str], transport: str | None = None
) -> bool:
    """Whether bytes of a read between host memories land only while this side makes progress: over
    the transport that was selected here or by UCX_TLS, or over all that UCX has without RDMA.
    """
    # NIXL's own threads make progress by themselves
    if backend != "UCX" or options.get("num_threads", "0") != "0":
        return False
    selected = transport or os.environ.get("UCX_TLS", "")
    return NEED_PROGRESS.issuperset(selected.split(",")) or not rdma_devices()


def rdma_devices() -> list[str]:
    """Names of this host's RDMA devices."""
    return [path.name for path in RDMA_DEVICES.glob("*")]


def nixl_api() -> Any:
    """NIXL's Python module, whichever wheel installed it. Raises ImportError."""
    if not rdma_devices():
        # UCX's InfiniBand modules load a second libnl, which can crash the process at exit
        os.environ.setdefault("UCX_MODULES", "^ib")
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")  # else it warns of each cut run
    for package in WHEELS:
        try:
            api = importlib.import_module(f"{package}._api")
            # it logs every agent on stdout
            logging.getLogger("nixl").setLevel(logging.WARNING)
            return api
        except ImportError as error:
            reason = error
    raise ImportError(f"none of {', '.join(WHEELS)} can be imported ({reason})")


def memory_of(name: str) -> NixlMemory:
    """The memory that layouts name `cpu` or `cuda:1`. Raises TransferError for others."""
    kind, _, number = name.partition(":")
    whole = number.isascii() and number.isdigit() and int(number[:9]) < MAX_DEVICE
    if kind not in SEGMENTS or (number and (not whole or kind == HOST)):
        raise TransferError(
            f"memory {name[:100]!r}: engine nixl moves {' and '.join(SEGMENTS)} memory. Use engine "
            "ascend for an NPU."
        )
    return NixlMemory(name, SEGMENTS[kind], int(number or 0))
