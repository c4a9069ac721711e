"""NIXL: RDMA, NVLink, TCP or shared memory through UCX and other backends.

Three facts shape this engine (docs/engines.md shows them). Without its progress thread an agent
uses no core, and the side that is read must make progress itself. NIXL has no time-out. A read that
does not complete stops only with its whole agent: that makes no progress any more, or is destroyed.
A reader over TCP that disappears can crash the process that it reads from, which may be a child.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from disagg.engines.base import Engine, TransferError, decode_metadata, one_memory, wait_until
from disagg.engines.nixl.agent import (
    Agent,
    backend_options,
    lands_by_progress,
    memory_of,
    nixl_api,
)
from disagg.engines.nixl.child import PACE_SECONDS, Child
from disagg.host.interfaces import is_loopback
from disagg.log import log
from disagg.plan.bind import CopyBatch
from kvpool.extras import install
from kvpool.layout import Slab
from kvpool.layout.types import HOST

MAX_KEPT_AGENTS = 16
KEPT_AGENTS = iter(range(MAX_KEPT_AGENTS))
"""One for each retired agent of this process that is kept undestroyed until the process ends. When
they are used up, a retired agent is destroyed before its fence ends.
"""


class NixlMetadata(msgspec.Struct, frozen=True):
    """What a peer needs to read from this side: the memory's name, and the agent's metadata."""

    memory: str
    agent: bytes


@dataclass(eq=False)
class NixlPeer:
    """A peer, the agent that reads it, its name there; `open`: transfers whose bytes may land."""

    metadata: NixlMetadata
    agent: Agent | None = None
    name: str = ""
    open: list[NixlTransfer] = field(default_factory=list)
    given_up: float | None = None


@dataclass(eq=False)
class NixlTransfer:
    """The read that was posted for a batch, and why it failed."""

    peer: NixlPeer
    agent: Agent
    read: int
    complete: bool = False
    problem: str | None = None


class NixlEngine(Engine[NixlPeer, NixlTransfer | None]):
    """NIXL with one backend; `options` are passed to the backend unchanged.

    `transports` is one UCX transport (`tcp`, `posix`, `rc`, …), `device` one network device of UCX
    (`eth0`, `mlx5_0:1`); the variables UCX_TLS and UCX_NET_DEVICES select several. A fence waits
    `patience` seconds for reads to complete before it retires their agent. Destroying an agent can
    crash a peer that it reads over TCP, so where reads land only by this side's progress a retired
    agent is kept instead, without progress and until the process ends.

    With `child`, peers read from a process of its own (host memory that kvpool allocated): a reader
    that disappears over TCP can crash that one only, and the next serves after it. Without a value
    that is so where peers of other hosts read, unless the host has RDMA devices.
    """

    name = "nixl"
    max_bytes = 128 << 20  # over CMA these are copied in one call, in some 20 ms
    parts_in_flight = 4
    run_overhead_bytes = 8 << 10
    progress_seconds = 0.0002  # over TCP and shared memory the rate depends on it

    def __init__(
        self,
        backend: str = "UCX",
        *,
        transports: str | None = None,
        device: str | None = None,
        patience: float = 5.0,
        child: bool | None = None,
        **options: str,
    ) -> None:
        self._backend, self._patience = backend, patience
        self._wants_child, self._read_from_elsewhere = child, False
        self._child: Child | None = None
        self._children_ended = 0
        self._renewal: str | None = None
        self._options = backend_options(backend, options, transports, device)
        self._by_progress = lands_by_progress(backend, options, transports)
        self._memory = ""
        self._slabs: list[Slab] = []
        self._peers: list[NixlPeer] = []
        self._retiring: list[Agent] = []
        self._agents_ended = 0
        self._agent: Agent | None = None
        self._current()

    @classmethod
    def availability(cls) -> str | None:
        """The package must be importable."""
        try:
            nixl_api()
        except ImportError as error:
            return f"{error}: {install('nixl')}, for CUDA 13 {install('nixl-cu13')}"
        return None

    def reached_at(self, host: str) -> None:
        self._read_from_elsewhere = not is_loopback(host)

    def register(self, slabs: Sequence[Slab]) -> None:
        """Registers slabs of one memory: the host's, or one CUDA device's."""
        name = one_memory(slabs, self._memory)
        self._current().register(slabs, memory_of(name or HOST))
        self._memory = name
        self._slabs.extend(slabs)

    def metadata(self) -> bytes:
        """The memory's name, and the metadata of the agent that peers read from: the child's, which
        is started by the first call, or this process's.
        """
        if self._child is None and self._has_child():
            self._start_child()
        agent = self._child.metadata if self._child else self._current().metadata()
        return msgspec.msgpack.encode(NixlMetadata(self._memory or HOST, agent))

    def connect(self, metadata: bytes) -> NixlPeer:
        """Loads the peer's metadata."""
        owner = decode_metadata(metadata, NixlMetadata)
        memory_of(owner.memory)
        peer = NixlPeer(owner)
        self._connected(peer)
        self._peers.append(peer)
        return peer

    def read(self, peer: NixlPeer, batch: CopyBatch) -> NixlTransfer | None:
        """Posts the batch as one read."""
        if not batch.runs:
            return None
        agent = self._connected(peer)
        src, dst = memory_of(peer.metadata.memory), memory_of(self._memory or HOST)
        transfer = NixlTransfer(peer, agent, agent.make_read(peer.name, batch, src, dst))
        peer.open.append(transfer)
        _check(transfer, agent.post)
        _arrived(transfer)
        return transfer

    def poll(self, transfer: NixlTransfer | None) -> bool:
        """Asks the agent."""
        if transfer is None:
            return True
        _check(transfer, transfer.agent.complete)
        return _arrived(transfer)

    def progress(self) -> None:
        """Lets all agents make progress. Starts another child if one has ended."""
        if self._child is not None and (how := self._child.progress()) is not None:
            self._children_ended += 1
            self._renewal = f"the process that served reads by engine nixl {how}."
            log.warning("engine nixl: %s Peers connect again.", self._renewal)
            try:
                self._child.start()
            except TransferError as error:
                log.error("engine nixl: this process serves reads by itself: %s", error)
                self._child.close()
                self._child = None
                self._wants_child = False
        for agent in (self._agent, *self._retiring):
            if agent is not None:
                agent.progress()

    def take_renewal(self) -> str | None:
        renewal, self._renewal = self._renewal, None
        return renewal

    def fence(self, peer: NixlPeer, timeout: float | None = None) -> bool:
        """Waits for the peer's reads to complete. If one does not, or has failed, its agent is
        retired once no other peer waits for it; other peers are then read by a new agent.
        """
        if peer.given_up is None:
            peer.given_up = time.monotonic()
        return wait_until(lambda: self._quiet(peer), timeout)

    def telemetry(self) -> Mapping[str, float]:
        """How many agents a fence retired, and how many children ended."""
        return {"agents_ended": self._agents_ended, "children_ended": self._children_ended}

    def close(self) -> None:
        """Fences all peers at once, destroys the agents and ends the child."""
        if self._child is not None:
            self._child.close()
            self._child = None
        for peer in self._peers:
            peer.given_up = peer.given_up or time.monotonic()
        for peer in list(self._peers):
            self.fence(peer)
        self._retire(self._agent)
        self._end_agents()

    def abandon(self) -> None:
        super().abandon()
        if self._child is not None:
            self._child.abandon()

    def _has_child(self) -> bool:
        """Whether a process of its own is to serve what was registered."""
        if self._wants_child is not None or not self._slabs:
            return bool(self._wants_child)
        return self._read_from_elsewhere and self._by_progress and self._memory == HOST

    def _start_child(self) -> None:
        try:
            self._child = Child(self._backend, self._options, self._slabs)
        except TransferError as error:
            if self._wants_child:
                raise
            log.info("engine nixl: this process serves reads by itself: %s", error)
            self._wants_child = False
        else:
            self.progress_seconds = PACE_SECONDS

    def _current(self) -> Agent:
        """The agent that reads and is read; a new one if the last was retired."""
        if self._agent is None:
            agent = Agent(self._backend, self._options)
            if self._slabs:
                agent.register(self._slabs, memory_of(self._memory))
            self._agent = agent
        return self._agent

    def _connected(self, peer: NixlPeer) -> Agent:
        """The agent by which a peer is read."""
        if peer.given_up is not None:
            raise TransferError("the peer was given up. Connect again.")
        if peer.agent is None or peer.agent in self._retiring:
            agent = self._current()
            peer.name, peer.agent = agent.connect(peer.metadata.agent), agent
        return peer.agent

    def _quiet(self, peer: NixlPeer) -> bool:
        """Whether no byte from a peer that was given up can land; retires its agent if need be."""
        self._poll_all(peer)
        seconds = time.monotonic() - (peer.given_up or 0.0)
        failed = any(transfer.problem is not None for transfer in peer.open)
        if peer.open and (failed or seconds >= self._patience):
            for transfer in peer.open:
                self._retire(transfer.agent)
            self._end_agents()
        if not peer.open and peer in self._peers:
            self._peers.remove(peer)
            if peer.agent is not None:
                peer.agent.disconnect(peer.name)
        return not peer.open

    def _poll_all(self, peer: NixlPeer) -> None:
        for transfer in peer.open:
            _check(transfer, transfer.agent.complete)
        peer.open = [transfer for transfer in peer.open if not transfer.complete]

    def _retire(self, agent: Agent | None) -> None:
        """An agent on which no read begins any more."""
        if agent is not None and agent not in self._retiring:
            self._retiring.append(agent)
        if agent is self._agent:
            self._agent = None

    def _end_agents(self) -> None:
        """Ends the retired agents whose reads no live peer waits for."""
        for agent in list(self._retiring):
            for peer in self._peers:
                self._poll_all(peer)
            left = [t for p in self._peers for t in p.open if t.agent is agent]
            if any(t.peer.given_up is None and t.problem is None for t in left):
                continue
            for transfer in left:
                transfer.problem = transfer.problem or "the peer was given up."
            for peer in self._peers:
                if peer.agent is agent:
                    peer.agent = None
            if not (left and self._keeps(left)):
                _destroy(agent)
            self._retiring.remove(agent)
            self._agents_ended += bool(left)
            for transfer in left:
                transfer.peer.open.remove(transfer)

    def _keeps(self, reads: list[NixlTransfer]) -> bool:
        """Whether an agent stays undestroyed without any of these reads landing."""
        memories = {self._memory, *(transfer.peer.metadata.memory for transfer in reads)}
        # a copy by a GPU may be under way, and ends without progress
        by_progress = self._by_progress and memories == {HOST}
        return by_progress and next(KEPT_AGENTS, None) is not None


def _check(transfer: NixlTransfer, is_complete: Callable[[int], bool]) -> None:
    """Asks whether a transfer's read is complete, and records a failure."""
    if transfer.complete or transfer.problem is not None:
        return
    try:
        transfer.complete = is_complete(transfer.read)
    except TransferError as error:
        transfer.problem = str(error)


def _arrived(transfer: NixlTransfer) -> bool:
    """Whether a transfer is complete. Raises TransferError if it has failed."""
    if transfer.problem is not None:
        raise TransferError(transfer.problem)
    if transfer.complete and transfer in transfer.peer.open:
        transfer.peer.open.remove(transfer)
    return transfer.complete


def _destroy(agent: Agent) -> None:
    if not agent.destroy():
        raise TransferError("NIXL's agent cannot be destroyed: an object still refers to it.")
