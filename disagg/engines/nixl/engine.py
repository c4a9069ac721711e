"""NIXL: RDMA, NVLink, TCP or shared memory through UCX and other backends.

Facts relied on (docs/engines.md): without its progress thread an agent burns no core, and whoever
is read must then make progress himself; there is no time-out; a read that has not ended can be
stopped only by ending the whole agent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from disagg.engines.base import Engine, TransferError
from disagg.engines.nixl.agent import BY_PROGRESS, COUNTS, Agent, backend_options, nixl_api
from disagg.engines.nixl.link import Link
from disagg.engines.nixl.memory import Told, common, memory_of, told
from disagg.plan.bind import CopyBatch
from kvpool.layout import Slab

if TYPE_CHECKING:
    from disagg.plan import TransferPlan

OWN_COUNTS = ("runs_by_number", "runs_by_address", "agents_ended")
MAX_ASIDE = 8
"""Agents that were ended and are not destroyed; the oldest are, beyond."""
PAUSE = 0.001


@dataclass(eq=False)
class Peer:
    """Whom we read. `open` are transfers of which a byte may still land."""

    told: Told
    link: Link | None = None
    plan: TransferPlan | None = None
    open: list[Transfer] = field(default_factory=list)
    given_up: float | None = None


@dataclass(eq=False)
class Transfer:
    """Reads that were posted for one batch and have not ended, by number; what went wrong."""

    peer: Peer
    agent: Agent
    reads: list[int]
    problem: str | None = None


class NixlEngine(Engine):
    """NIXL with one backend; `options` go to the backend as they are.

    `transports` is one of UCX's names (`tcp`, `posix`, `rc`, …); several are given by the variable
    UCX_TLS. A fence waits `patience` seconds for reads to end by themselves before it ends the
    agent, which can crash a peer that is read over TCP. Where `transports` says that nothing lands
    without us, the agent is laid aside and the peer lives.
    """

    name = "nixl"
    run_overhead_bytes = 8 << 10
    progress_seconds = 0.0002  # over TCP and shared memory this is what the rate depends on

    def __init__(
        self,
        backend: str = "UCX",
        *,
        transports: str | None = None,
        patience: float = 5.0,
        **options: str,
    ) -> None:
        self._backend, self._patience = backend, patience
        self._options = backend_options(backend, options, transports)
        self._lay_aside = transports in BY_PROGRESS
        self._memory = ""
        self._slabs: list[tuple[int, int, int, str]] = []
        self._peers: list[Peer] = []
        self._ending: list[Agent] = []
        self._aside: list[Agent] = []
        self._counts = dict.fromkeys((*COUNTS, *OWN_COUNTS), 0.0)
        self._agent: Agent | None = None
        self._current()

    @classmethod
    def availability(cls) -> str | None:
        """The package must be importable."""
        try:
            nixl_api()
        except ImportError as error:
            return f"{error}. Install kvpool[nixl]."
        return None

    def register(self, slabs: Sequence[Slab]) -> None:
        """Registers slabs of one memory: the host's, or one CUDA device's."""
        name = common(slabs, self._memory)
        memory = memory_of(name or "cpu")
        rows = [(slab.base, slab.nbytes, memory.device, "") for slab in slabs]
        self._current().register(rows, memory)
        self._memory = name
        self._slabs.extend(rows)

    def metadata(self) -> bytes:
        """Where the memory lies, and the agent's metadata."""
        return msgspec.msgpack.encode(Told(self._memory or "cpu", self._current().metadata()))

    def connect(self, metadata: bytes) -> Peer:
        """Loads the peer's metadata."""
        peer = Peer(told(metadata))
        self._link(peer)
        self._peers.append(peer)
        return peer

    def prepare(self, peer: Peer, plan: TransferPlan) -> None:
        """Lists are made by the first read that uses them: it says which source the peer is."""
        peer.plan = plan
        if peer.link is not None:
            peer.link.drop_lists()

    def read(self, peer: Peer, batch: CopyBatch) -> Transfer | None:
        """Posts runs by number, where many have one, and the rest by address."""
        if not batch.runs:
            return None
        link = self._link(peer)
        reads, by_number = link.make(batch, peer.plan)
        self._counts["runs_by_number"] += by_number
        self._counts["runs_by_address"] += batch.runs - by_number
        transfer = Transfer(peer, link.agent, reads)
        peer.open.append(transfer)
        _ask(transfer, link.agent.post)
        _ended(transfer)
        return transfer

    def poll(self, transfer: Transfer | None) -> bool:
        """Asks the agent."""
        if transfer is None:
            return True
        _ask(transfer, transfer.agent.ended)
        return _ended(transfer)

    def progress(self) -> None:
        """Lets all agents make progress."""
        for agent in (self._agent, *self._ending):
            if agent is not None:
                agent.progress()

    def fence(self, peer: Peer, timeout: float | None = None) -> bool:
        """Waits for the peer's reads to end. Where one does not, or has failed, the agent is ended
        as soon as it serves nobody else: what the others read next is read by a new agent.
        """
        if peer.given_up is None:
            peer.given_up = time.monotonic()
        stop = None if timeout is None else time.monotonic() + timeout
        while not self._quiet(peer):
            if stop is not None and time.monotonic() >= stop:
                return False
            time.sleep(PAUSE)
        return True

    def telemetry(self) -> Mapping[str, float]:
        """What NIXL says of the reads that have ended (seconds from their post), how many runs were
        described how, and how many agents were ended by a fence.
        """
        return dict(self._counts)

    def close(self) -> None:
        """Fences all peers, all at once, and ends the agent."""
        for peer in self._peers:
            peer.given_up = peer.given_up or time.monotonic()
        for peer in list(self._peers):
            self.fence(peer)
        self._retire(self._agent)
        self._end_agents()
        while self._aside:
            _destroy(self._aside.pop())

    def _current(self) -> Agent:
        """The agent that reads and is read; a new one where the last was ended."""
        if self._agent is None:
            agent = Agent(self._backend, self._options, self._counts)
            if self._slabs:
                agent.register(self._slabs, memory_of(self._memory))
            self._agent = agent
        return self._agent

    def _link(self, peer: Peer) -> Link:
        if peer.given_up is not None:
            raise TransferError("the peer was given up. Connect again.")
        if peer.link is None or peer.link.agent in self._ending:
            peer.link = Link(self._current(), memory_of(self._memory or "cpu"), peer.told)
        return peer.link

    def _quiet(self, peer: Peer) -> bool:
        """Whether nothing of a peer that was given up can land; does what can be done for it."""
        self._poll_all(peer)
        waited = time.monotonic() - (peer.given_up or 0.0)
        failed = any(transfer.problem is not None for transfer in peer.open)
        if peer.open and (failed or waited >= self._patience):
            for transfer in peer.open:
                self._retire(transfer.agent)
            self._end_agents()
        if not peer.open and peer in self._peers:
            self._peers.remove(peer)
            if peer.link is not None:
                peer.link.leave()
        return not peer.open

    def _poll_all(self, peer: Peer) -> None:
        for transfer in list(peer.open):
            _ask(transfer, transfer.agent.ended)
            if not transfer.reads:
                peer.open.remove(transfer)

    def _retire(self, agent: Agent | None) -> None:
        """No read begins on an agent any more."""
        if agent is not None and agent not in self._ending:
            self._ending.append(agent)
        if agent is self._agent:
            self._agent = None

    def _end_agents(self) -> None:
        """Ends the retired agents on which nobody waits for a read."""
        for agent in list(self._ending):
            for peer in self._peers:
                self._poll_all(peer)
            left = [t for p in self._peers for t in p.open if t.agent is agent]
            if any(t.peer.given_up is None and t.problem is None for t in left):
                continue
            for transfer in left:
                transfer.problem = transfer.problem or "the peer was given up."
            for peer in self._peers:
                if peer.link is not None and peer.link.agent is agent:
                    peer.link = None
            if left and self._lay_aside:
                self._aside.append(agent)
            else:
                _destroy(agent)
            self._ending.remove(agent)
            self._counts["agents_ended"] += bool(left)
            for transfer in left:
                transfer.peer.open.remove(transfer)
        while len(self._aside) > MAX_ASIDE:
            _destroy(self._aside.pop(0))


def _ask(transfer: Transfer, question: Callable[[int], bool]) -> None:
    """Asks whether each read of a transfer has ended, and keeps what is wrong."""
    for read in list(transfer.reads) if transfer.problem is None else ():
        try:
            if question(read):
                transfer.reads.remove(read)
        except TransferError as error:
            transfer.problem = str(error)
            return


def _ended(transfer: Transfer) -> bool:
    """Whether a transfer has ended. Raises TransferError if it never will."""
    if transfer.problem is not None:
        raise TransferError(transfer.problem)
    if not transfer.reads and transfer in transfer.peer.open:
        transfer.peer.open.remove(transfer)
    return not transfer.reads


def _destroy(agent: Agent) -> None:
    if not agent.destroy():
        raise TransferError("NIXL's agent cannot be ended: something still refers to it.")
