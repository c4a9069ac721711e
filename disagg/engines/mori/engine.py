"""Reads through AMD's MoRI-IO over RDMA.

Written from MoRI's sources and the calls that SGLang and vLLM make of it; not yet run
(docs/engines.md). A peer is an address and a port, which another process may have taken over; so a
token is read behind the first read from each of its registrations.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

import msgspec

from disagg.engines.base import EngineUnavailable, TransferError
from disagg.engines.mori.package import MoriIO, MoriSettings, choose, missing, mori_io
from disagg.engines.mori.reader import MoriMetadata, reader_of
from disagg.engines.threaded import ThreadedEngine, ThreadedPeer
from kvpool.layout import Slab
from kvpool.layout.types import HOST


class MoriEngine(ThreadedEngine):
    """Memory of the host and of AMD GPUs over RDMA. Peers reach this host as `hostname`, an IPv4
    address; `device` names NICs (default: all). The numbers are those of MoRI's backend. Each peer
    is read through its own `IOEngine`.
    """

    name = "mori"
    max_bytes = 128 << 20  # MoRI joins runs, and refuses more than the longest message of the NIC
    max_runs = 4096  # four parts fit the send queues; for more MoRI would wait

    def __init__(
        self,
        hostname: str = "127.0.0.1",
        device: str = "",
        *,
        qp_per_transfer: int = 4,
        post_batch_size: int = -1,
        num_worker_threads: int = 4,
    ) -> None:
        counts = {"qp_per_transfer": qp_per_transfer, "num_worker_threads": num_worker_threads}
        for name, value in counts.items():
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1.")
        if post_batch_size != -1 and post_batch_size < 1:
            raise ValueError(f"post_batch_size={post_batch_size}: must be at least 1, or -1.")
        reason = self.availability()
        if reason is not None:
            raise EngineUnavailable(f"engine mori: {reason}")
        _check_host(hostname)
        choose(device)
        super().__init__(hostname)
        self._settings = MoriSettings(
            hostname=hostname,
            qp_per_transfer=qp_per_transfer,
            post_batch_size=post_batch_size,
            num_worker_threads=num_worker_threads,
        )
        self._slabs: list[Slab] = []
        self._serving: MoriIO | None = None

    @classmethod
    def availability(cls) -> str | None:
        """All that is missing; if nothing is, the package must be importable."""
        reason = missing()
        if reason is None:
            try:
                mori_io()
            except EngineUnavailable as error:
                return str(error)
        return reason

    def register(self, slabs: Sequence[Slab]) -> None:
        """Registers slabs of any memory of this host, before the first `connect`. MoRI hands them
        to NICs when they are first read, and ends the process if a NIC refuses one.
        """
        if self._peers:
            raise TransferError("peers are read already: register all memory before.")
        for slab in slabs:
            kind, _, number = slab.memory.partition(":")
            if slab.memory != HOST and not (kind == "cuda" and number.isdecimal()):
                raise TransferError(
                    f"slab of {slab.nbytes} bytes on {slab.memory}: engine mori moves memory of "
                    f"{HOST} and cuda:N, as torch calls AMD GPUs."
                )
        self._claim([(slab.base, slab.nbytes) for slab in slabs])
        self._slabs.extend(slabs)
        if self._serving is not None:
            self._serving.register(slabs)

    def metadata(self) -> bytes:
        """The serving `IOEngine`, its token and its registrations."""
        if self._serving is None:
            self._serving = self._io()
        io = self._serving
        token, *memory = (
            bytes(io.memory[base].pack())
            for base in (io.token_base, *(slab.base for slab in self._slabs))
        )
        engine = bytes(io.description().pack())
        return msgspec.msgpack.encode(MoriMetadata(engine, bytes(io.tokens[0]), token, memory))

    def connect(self, metadata: bytes) -> ThreadedPeer:
        """Returns at once: the first read fails if the peer cannot be reached."""
        reader = reader_of(metadata, self._own, self._io)
        return self._connected(f"mori {reader.address}", reader, reader.ranges)

    def close(self) -> None:
        """Gives up all peers at once, and destroys what reads and what serves."""
        threads = [peer.thread for peer in self._peers]
        super().close()
        for thread in threads:
            thread.join()
        if not (self._serving is None or self._serving.destroy()):
            raise TransferError("MoRI's IOEngine cannot be destroyed: an object refers to it.")

    def _io(self) -> MoriIO:
        io = MoriIO(self._settings, self._slabs)
        self._warn_exposed(io.description().port)
        return io


def _check_host(hostname: str) -> None:
    """MoRI ends the process if it cannot listen there."""
    try:
        wrong = ipaddress.IPv4Address(hostname).is_unspecified
        with socket.socket() as probe:
            probe.bind((hostname, 0))
    except (ValueError, OSError):
        wrong = True
    if wrong:
        raise ValueError(f"hostname {hostname!r}: must be an IPv4 address of this host.")
