"""Reads through AMD's MoRI-IO over RDMA.

Written from MoRI's sources and the calls that SGLang and vLLM make of it; not yet run
(docs/engines.md). Three facts shape this engine. Only destroying an `IOEngine` ends a read that
does not succeed. A call may take seconds, so each peer has threads of its own, which post its reads
and wait for them. A peer is an address and a port, which another process may have taken over; so a
token is read behind the first read from each of its registrations.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import time
from collections.abc import Mapping, Sequence
from itertools import count

import msgspec

from disagg.engines.base import Engine, EngineUnavailable, TransferError, waited
from disagg.engines.mori.package import MoriIO, MoriRuns, MoriSettings, choose, missing, mori_io
from disagg.engines.mori.reads import (
    MoriMetadata,
    MoriPeer,
    MoriTransfer,
    calls_of,
    move,
    peer_of,
)
from disagg.engines.ranges import Ranges
from disagg.host.loopback import is_loopback
from disagg.host.waker import Waker
from disagg.plan.bind import CopyBatch
from kvpool.layout import Slab
from kvpool.layout.types import HOST

log = logging.getLogger("disagg")


class MoriEngine(Engine):
    """Memory of the host and of AMD GPUs over RDMA. Peers reach this host as `hostname`, an IPv4
    address; `device` names NICs (default: all). The numbers are those of MoRI's backend.

    A fence waits `patience` seconds for reads to succeed before it destroys their `IOEngine`.
    """

    name = "mori"
    max_bytes = 128 << 20  # MoRI joins runs, and refuses more than the longest message of the NIC
    max_runs = 4096  # four parts fit the send queues; for more MoRI would wait
    parts_in_flight = 4
    background = True
    progress_seconds = 0.05  # NICs answer peers

    def __init__(
        self,
        hostname: str = "127.0.0.1",
        device: str = "",
        *,
        qp_per_transfer: int = 4,
        post_batch_size: int = -1,
        num_worker_threads: int = 4,
        patience: float = 5.0,
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
        self._settings = MoriSettings(
            hostname, qp_per_transfer, post_batch_size, num_worker_threads
        )
        self._patience = patience
        self._slabs: list[Slab] = []
        self._own = Ranges.of([])
        self._serving: MoriIO | None = None
        self._reading: MoriIO | None = None
        self._retiring: list[MoriIO] = []
        self._peers: list[MoriPeer] = []
        self._slots = count()
        self._waker = Waker()
        self._engines_ended = 0
        self._exposed = False

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

    def notify(self, descriptor: int) -> None:
        """See Engine."""
        self._waker.set(descriptor)

    def register(self, slabs: Sequence[Slab]) -> None:
        """Registers slabs of any memory of this host. MoRI hands them to NICs when they are first
        read, and ends the process if a NIC refuses one.
        """
        for slab in slabs:
            kind, _, number = slab.memory.partition(":")
            if slab.memory != HOST and not (kind == "cuda" and number.isdecimal()):
                raise TransferError(
                    f"slab of {slab.nbytes} bytes on {slab.memory}: engine mori moves memory of "
                    f"{HOST} and cuda:N, as torch calls AMD GPUs."
                )
        try:
            self._own = Ranges.of((each.base, each.nbytes) for each in (*self._slabs, *slabs))
        except ValueError as error:
            raise TransferError(f"slabs: {error}") from None
        self._slabs.extend(slabs)
        for io in (self._serving, self._reading):
            if io is not None:
                io.register(slabs)

    def metadata(self) -> bytes:
        """The serving `IOEngine`, its token and its registrations."""
        if self._serving is None:
            self._serving = MoriIO(self._settings, self._slabs)
        io = self._serving
        self._start(io)
        engine = io.description()
        token_memory, *memory = (
            bytes(io.memory[base].pack())
            for base in (io.token_base, *(slab.base for slab in self._slabs))
        )
        found = MoriMetadata(bytes(engine.pack()), io.token, token_memory, memory)
        return msgspec.msgpack.encode(found)

    def connect(self, metadata: bytes) -> MoriPeer:
        """Starts this side. The first read fails if the peer cannot be reached."""
        peer = peer_of(metadata, next(self._slots), self.parts_in_flight)
        self._start(self._current())
        self._peers.append(peer)
        return peer

    def read(self, peer: MoriPeer, batch: CopyBatch) -> MoriTransfer | None:
        """Queues the batch for the peer's threads, cut at the edges of registrations."""
        if not batch.runs:
            return None
        if peer.given_up is not None:
            raise TransferError("the peer was given up. Connect again.")
        batch = peer.ranges.cut(batch, batch.src, "the peer")
        batch = self._own.cut(batch, batch.dst, "this engine")
        calls = list(calls_of(batch, self._own, peer.ranges))
        transfer = MoriTransfer(peer, self._current())
        peer.open.append(transfer)
        peer.threads.submit(self._work, transfer, calls)
        return transfer

    def poll(self, transfer: MoriTransfer | None) -> bool:
        """Whether a thread has completed it."""
        if transfer is None:
            return True
        if not transfer.ended:
            return False
        if not transfer.landing and transfer in transfer.peer.open:
            transfer.peer.open.remove(transfer)
        if transfer.problem is not None:
            raise TransferError(transfer.problem)
        return True

    def fence(self, peer: MoriPeer, timeout: float | None = None) -> bool:
        """Waits for the peer's reads to succeed. If one does not, or has failed, its `IOEngine` is
        destroyed once no other peer waits for it; other peers are then read by a new one.
        """
        if peer.given_up is None:
            peer.given_up = time.monotonic()
        return waited(lambda: self._quiet(peer), timeout)

    def telemetry(self) -> Mapping[str, float]:
        """How many `IOEngine`s fences destroyed."""
        return {"engines_ended": float(self._engines_ended)}

    def close(self) -> None:
        """Fences all peers at once, and destroys what serves and reads."""
        for peer in self._peers:
            peer.given_up = peer.given_up or time.monotonic()
        for peer in list(self._peers):
            self.fence(peer)
        self._retire(self._reading)
        self._end_retiring()
        if self._retiring or not (self._serving is None or self._serving.destroy()):
            raise TransferError("MoRI's IOEngine cannot be destroyed: an object refers to it.")
        self._waker.close()

    def _start(self, io: MoriIO) -> None:
        """Starts it, and says once that registered memory can be reached from other hosts."""
        io.start()
        if self._exposed or is_loopback(self._settings.hostname):
            return
        self._exposed = True
        log.warning(
            "engine %s at %s: any process that reaches its port (now %d) can read and overwrite "
            "the registered memory, also where endpoints have keys. Let a firewall admit only this "
            "deployment's hosts (docs/security.md).",
            self.name,
            self._settings.hostname,
            io.description().port,
        )

    def _current(self) -> MoriIO:
        """What reads; a new one if the last was retired."""
        if self._reading is None:
            self._reading = MoriIO(self._settings, self._slabs)
        return self._reading

    def _work(self, transfer: MoriTransfer, calls: list[MoriRuns]) -> None:
        """In a thread of the peer: a transfer from its first call to its end."""
        try:
            move(transfer, calls)
        except Exception as error:  # it fails this read only
            transfer.problem = str(error)
        transfer.ended = True
        self._waker.wake()

    def _quiet(self, peer: MoriPeer) -> bool:
        """Whether no byte from a peer that was given up can land; retires its `IOEngine` if need
        be.
        """
        peer.open = [transfer for transfer in peer.open if transfer.landing]
        waited = time.monotonic() - (peer.given_up or 0.0)
        failed = any(each.ended and each.landing for each in peer.open)
        if peer.open and (failed or waited >= self._patience):
            for transfer in peer.open:
                self._retire(transfer.io)
            self._end_retiring()
        if not peer.open and peer in self._peers:
            self._peers.remove(peer)
            peer.threads.shutdown(wait=False)
        return not peer.open

    def _retire(self, io: MoriIO | None) -> None:
        """What no read begins on any more."""
        if io is not None and io not in self._retiring:
            self._retiring.append(io)
        if io is self._reading:
            self._reading = None

    def _end_retiring(self) -> None:
        """Destroys what is retired and no live peer waits for."""
        for io in list(self._retiring):
            left = [each for peer in self._peers for each in peer.open if each.io is io]
            left = [each for each in left if each.landing]
            if any(each.peer.given_up is None and not each.ended for each in left):
                continue
            for transfer in left:
                transfer.abandoned = True
            if io.destroy():
                self._retiring.remove(io)
                self._engines_ended += bool(left)
                for transfer in left:
                    transfer.peer.open.remove(transfer)


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
