"""NIXL and Mooncake without us: one request of all runs, polled without a pause."""

from __future__ import annotations

import uuid

import numpy as np

from disagg.engines.mooncake import package as mooncake
from disagg.engines.nixl.agent import backend_options, nixl_api

CALL_RUNS = 1024
"""Runs per call of Mooncake: its queue takes no more at once."""


class BareNixl:
    """An agent with host memory `[bytes]`, over one UCX transport or those that UCX chooses."""

    def __init__(self, memory: np.ndarray, transports: str | None = None) -> None:
        api = nixl_api()
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent = api.nixl_agent(uuid.uuid4().hex, config)
        self._agent.create_backend("UCX", backend_options("UCX", {}, transports))
        self._agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")

    def metadata(self) -> bytes:
        return self._agent.get_agent_metadata()

    def connect(self, metadata: bytes) -> None:
        name = self._agent.add_remote_agent(metadata)
        self._peer = name.decode() if isinstance(name, bytes) else name

    def progress(self) -> None:
        self._agent.get_new_notifs()

    def read(self, src: np.ndarray, dst: np.ndarray, nbytes: np.ndarray) -> None:
        """Reads runs, int64 `[N]` each: from a request to its end."""
        agent = self._agent
        remote, local = (
            agent.get_xfer_descs(np.stack([at, nbytes, 0 * at], 1).astype(np.uint64), "DRAM")
            for at in (src, dst)
        )
        handle = agent.initialize_xfer("READ", local, remote, self._peer)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        assert state == "DONE"
        agent.release_xfer_handle(handle)


class BareMooncake:
    """A `TransferEngine` over TCP with host memory `[bytes]`."""

    def __init__(self, memory: np.ndarray) -> None:
        mooncake.package()
        mooncake.choose("tcp")
        self._engine = mooncake.start("tcp", "127.0.0.1", "")
        mooncake.register_ranges(self._engine, [(memory.ctypes.data, memory.nbytes)])

    def metadata(self) -> bytes:
        return f"127.0.0.1:{self._engine.get_rpc_port()}".encode()

    def connect(self, metadata: bytes) -> None:
        self._peer = metadata.decode()

    def progress(self) -> None:
        """Its own threads answer."""

    def read(self, src: np.ndarray, dst: np.ndarray, nbytes: np.ndarray) -> None:
        """Reads runs, int64 `[N]` each: from a request to its end."""
        for at in range(0, src.size, CALL_RUNS):
            lists = [column[at : at + CALL_RUNS].tolist() for column in (dst, src, nbytes)]
            number = self._engine.batch_transfer_async_read(self._peer, *lists)
            assert number and self._engine.get_batch_transfer_status([number]) == 0
