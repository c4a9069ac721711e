"""One life of a NIXL agent, from its registrations to its provable end.

Only the end of an agent is certain: what NIXL calls release and disconnect leave reads in flight,
whose bytes land later. All of NIXL's objects stay in here and are known outside by number, because
one of them that is left in somebody's traceback would keep the agent alive.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import uuid
import weakref
from collections import Counter
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from disagg.engines.base import TransferError
from disagg.engines.nixl.lists import Numbers
from disagg.engines.nixl.memory import Memory

PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")
HERE = "NIXL_INIT_AGENT"
COUNTS = ("reads", "bytes", "descriptors", "post_seconds", "transfer_seconds")
WITHOUT_ERRORS = {"posix", "sysv", "xpmem", "sm", "shm"}
"""UCX's transports that work only where it is told to handle no errors."""
BY_PROGRESS = {"tcp", "posix", "sysv"}
"""Those by which nothing lands here unless we make progress."""

Rows = npt.NDArray[np.uint64]


class Agent:
    """An agent with one backend. Every method raises TransferError with NIXL's
    reason. `counts` gathers what NIXL says of reads that have ended, by the names of COUNTS.
    """

    def __init__(
        self, backend: str, options: Mapping[str, str], counts: MutableMapping[str, float]
    ) -> None:
        api = nixl_api()
        known = vars(api.nixlBind).values()  # its exceptions share no base of their own
        self._errors = tuple(e for e in known if isinstance(e, type) and issubclass(e, Exception))
        config = api.nixl_agent_config(
            enable_prog_thread=False, backends=[], capture_telemetry=True
        )
        self._nixl: Any = api.nixl_agent(uuid.uuid4().hex, config)
        self._alive = weakref.ref(self._nixl.agent)
        self.counts = counts
        self._number = count()
        self._held: dict[int, Any] = {}
        self._peers: Counter[str] = Counter()
        self._call(f"backend {backend} with {options}", "create_backend", backend, dict(options))

    def register(self, slabs: list[tuple[int, int, int, str]], memory: Memory) -> None:
        """Registers (address, length, device, "") rows."""
        what = f"registration of {len(slabs)} slabs on {memory.name}"
        self._call(what, "register_memory", slabs, memory.segment)

    def metadata(self) -> bytes:
        """What a peer's agent must know."""
        found: bytes = self._call("metadata", "get_agent_metadata")
        return found

    def connect(self, metadata: bytes) -> str:
        """Loads a peer's metadata, once more for each call; returns his agent's name."""
        name = self._call("peer's metadata", "add_remote_agent", metadata)
        name = name.decode() if isinstance(name, bytes) else name
        self._peers[name] += 1
        return str(name)

    def disconnect(self, name: str) -> None:
        """Takes one `connect` back; the last one leaves the peer."""
        self._peers[name] -= 1
        if not self._peers[name]:
            del self._peers[name]
            with suppress(TransferError):  # NIXL itself forgets a peer that is gone
                self._call("disconnection", "remove_remote_agent", name)

    def prepare(self, name: str, rows: Rows, memory: Memory) -> int:
        """A list of a peer's strided rows `[R, 5]`, or of those HERE; refused outside of what is
        registered. Sets their device.
        """
        rows[:, 2] = memory.device
        return self._hold(self._call("list", "prep_xfer_dlist", name, rows, memory.segment))

    def numbered(self, src: int, src_numbers: Numbers, dst: int, dst_numbers: Numbers) -> int:
        """A read of numbered places of one prepared list into those of another."""
        # NIXL's objects are arguments only: a variable would stay in the traceback
        made = self._call(
            f"read of {src_numbers.size} prepared runs",
            "make_prepped_xfer",
            "READ",
            self._held[dst],
            dst_numbers,
            self._held[src],
            src_numbers,
        )
        return self._hold(made)

    def described(self, name: str, src: tuple[Rows, Memory], dst: tuple[Rows, Memory]) -> int:
        """A read of a peer's rows `[N, 3]` (address, length, device) into rows of one's own. Sets
        their devices.
        """
        for rows, memory in (src, dst):
            rows[:, 2] = memory.device
        there, here = (self._call("rows", "get_xfer_descs", r, m.segment) for r, m in (src, dst))
        what = f"read of {len(src[0])} runs"
        return self._hold(self._call(what, "initialize_xfer", "READ", here, there, name))

    def post(self, read: int) -> bool:
        """Starts a read; whether it has ended already. If this raises, bytes may still land."""
        return self._ended(read, self._call("read", "transfer", self._held[read]))

    def ended(self, read: int) -> bool:
        """Whether every byte of a read has arrived. If this raises, bytes may still land."""
        return self._ended(read, self._call("read", "check_xfer_state", self._held[read]))

    def _ended(self, read: int, state: str) -> bool:
        if state == "PROC":
            return False
        if state != "DONE":
            raise TransferError(f"NIXL read: the backend reports {state}.")
        seen = self._call("telemetry", "get_xfer_telemetry", self._held[read])
        self.counts["reads"] += 1
        self.counts["descriptors"] += seen.descCount
        self.counts["bytes"] += seen.totalBytes
        self.counts["post_seconds"] += seen.postDuration / 1e6
        self.counts["transfer_seconds"] += seen.xferDuration / 1e6
        self.release(read)
        return True

    def release(self, number: int) -> None:
        """Frees a list, or a read that has ended or was never posted."""
        self._call("release", "release_xfer_handle", self._held.pop(number))

    def progress(self) -> None:
        """Polls for notifications, which drives the transports."""
        self._call("progress", "get_new_notifs")

    def destroy(self) -> bool:
        """Ends the agent with all it holds; whether it is gone, so that nothing more can land."""
        if self._nixl is not None:
            for number in list(self._held):
                with suppress(TransferError):
                    self.release(number)
            for name in list(self._peers):
                self._peers[name] = 1
                self.disconnect(name)
            self._nixl = None
        if self._alive() is not None:
            gc.collect()
        return self._alive() is None

    def _hold(self, made: Any) -> int:
        number = next(self._number)
        self._held[number] = made
        return number

    def _call(self, what: str, method: str, *given: Any) -> Any:
        try:
            return getattr(self._nixl, method)(*given)
        except self._errors as error:
            reason = str(error) or type(error).__name__
        del given  # this frame stays in the traceback, with the objects that it names
        raise TransferError(f"NIXL {what}: {reason}")


def backend_options(backend: str, given: dict[str, str], transports: str | None) -> dict[str, str]:
    """The backend's options, with UCX's for one transport."""
    if transports is None:
        return given
    if backend != "UCX" or "," in transports:
        raise ValueError(
            f"transports={transports!r}: one of UCX's transports. Give a list of them by the "
            "variable UCX_TLS, and another backend its own options."
        )
    forced = os.environ.get("UCX_TLS", transports)
    if forced != transports:
        raise ValueError(f"transports={transports!r}, but the variable UCX_TLS={forced} wins.")
    config = ",".join(filter(None, [given.get("engine_config"), f"TLS={transports}"]))
    handling = {"ucx_error_handling_mode": "none"} if transports in WITHOUT_ERRORS else {}
    return {**handling, **given, "engine_config": config}


def nixl_api() -> Any:
    """NIXL's Python module, under whichever name its wheel gave it. Raises ImportError."""
    if not any(Path("/sys/class/infiniband").glob("*")):
        # UCX's InfiniBand modules bring a second libnl, which can crash the process at exit
        os.environ.setdefault("UCX_MODULES", "^ib")
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")  # it warns of each run of a read that is cut
    for package in PACKAGES:
        try:
            api = importlib.import_module(f"{package}._api")
            # it announces every agent on stdout
            logging.getLogger("nixl").setLevel(logging.WARNING)
            return api
        except ImportError as error:
            reason = error
    raise ImportError(f"none of {', '.join(PACKAGES)} can be imported ({reason})")
