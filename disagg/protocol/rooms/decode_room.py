"""One room on decode, from its request to its end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from disagg.digest.arrived import ArrivedDigests
from disagg.plan.bind import Count
from disagg.plan.lookup import id_clash
from disagg.protocol.codec import Aux, pack_aux, unpack_aux
from disagg.protocol.messages import ChunkReady, OfRoom
from disagg.protocol.metrics import RoomMetrics
from disagg.protocol.peers.link import Link, PrefillRank, Read
from disagg.protocol.rooms.offered import LayerRange, Offered
from disagg.protocol.status import Phase, PhasedRoom, RoomEvent, Side
from disagg.protocol.verification import Verification
from kvpool.layout import RequestAddress


@dataclass(slots=True)
class ReadProgress:
    """When a read has had its turn, and the bytes that have arrived since."""

    begun: float | None = None
    nbytes: int = 0


@dataclass(eq=False, slots=True, kw_only=True)
class DecodeRoom(PhasedRoom):
    """One request that decode has asked for. With `declined`, nothing of it is read; with
    `at_most`, `table` has room for more tokens than it may have, until prefill says how many.
    """

    side: ClassVar[Side] = "decode"
    link: Link
    table: RequestAddress
    start: int
    attempt: str
    touched: float
    """When something has happened last: a chunk, the end of a read, a digest, an ack."""
    metrics: RoomMetrics = field(default_factory=RoomMetrics)
    expected: frozenset[str] = frozenset()
    declined: bool = False
    at_most: bool = False
    offered: dict[int, Offered] = field(default_factory=dict)
    """By source rank that is asked, which positions and layers are ready."""
    seen: set[tuple[int, int, int, bool, LayerRange | None]] = field(default_factory=set)
    """Chunks by source rank, start, stop, last and layers."""
    latest: dict[int, tuple[ChunkReady, RequestAddress]] = field(default_factory=dict)
    """By source rank, the chunk that came last and its block table, until the last one comes."""
    reads: dict[Read, ReadProgress] = field(default_factory=dict)
    """Those that have not ended."""
    arrived: dict[int, ArrivedDigests] = field(default_factory=dict)
    """By source rank, of what is not kept as it arrives."""
    checks: dict[int, Verification] = field(default_factory=dict)
    """By source rank, comparisons that are not done."""
    aux: Aux = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether the last chunk of every source rank that is asked is ready."""
        return all(offered.closed for offered in self.offered.values())

    @property
    def reading(self) -> bool:
        return bool(self.reads)

    @property
    def working(self) -> bool:
        """Whether this side has something to do for it: a read, or a digest."""
        return self.reading or any(check.own is None for check in self.checks.values())

    @property
    def waits_for(self) -> str:
        link = self.link
        if self.phase is Phase.HANDSHAKE:
            silent = link.names(n for n, hello in enumerate(link.hellos) if hello is None)
            return f"the hello of {silent}" + (f" ({link.lost})" if link.lost else "")
        if self.working:
            return "reads and digests of its own"
        if self.phase is Phase.VERIFYING:
            return f"digests of {link.names(sorted(self.checks))}"
        if self.phase is Phase.RELEASING:
            unreleased = (n for n in self.offered if n not in self.metrics.released)
            return f"the ack of {link.names(unreleased)}"
        open_ranks = {n: offered for n, offered in self.offered.items() if not offered.closed}
        first = min(open_ranks.values(), key=lambda offered: offered.stop)
        awaited = first.awaited or f"chunks from position {first.stop} on,"
        return f"{awaited} of {link.names(open_ranks)}"

    @property
    def needs_caller(self) -> bool:
        return True

    def facts(self) -> dict[str, Any]:
        generations = (hello.generation if hello else "" for hello in self.link.hellos)
        return {
            "peer": ", ".join(self.link.addresses),
            "generation": ", ".join(generations),
            "start": self.start,
            "tokens": self.table.num_tokens,
        }

    def asked_ranks(self) -> Iterator[tuple[PrefillRank, str]]:
        """The ranks that are asked for it, and not lost, each with its generation."""
        for source in self.offered:
            rank = self.link.ranks[source]
            if rank.hello is not None:
                yield rank, rank.hello.generation

    def message(self, kind: type[OfRoom], generation: str, **fields: Any) -> OfRoom:
        """A message about it, to a rank of that generation."""
        return kind(generation=generation, room=self.name, attempt=self.attempt, **fields)

    def ask(self, now: float) -> None:
        """All ranks are known, and those asked that the link says."""
        self.move(RoomEvent.RANKS_KNOWN)
        self.offered = {source: Offered(layers) for source, layers in self.link.layers.items()}
        self.metrics.plan_seconds = self.link.plan_seconds
        self.metrics.asked_seconds = now - self.opened_at

    def layer_ready(self, owner: str, layer: int) -> bool:
        """Whether all that is lacking of a layer was read, from every rank that has any of it."""
        plan = self.link.plan
        if plan is None or self.phase in (Phase.HANDSHAKE, Phase.SUCCESS, Phase.FAILED):
            return self.phase is Phase.SUCCESS
        total, ranks = self.table.num_tokens, plan.contributors(range(layer, layer + 1), owner)
        for offered in (self.offered[n] for n in ranks):
            # with `at_most`, windows and states come after the last chunk
            if not offered.reaches(total, owner, layer) or (self.at_most and not offered.closed):
                return False
        return not any(read.moves(owner, layer) for read in self.reads if read.rank.source in ranks)

    def missing_aux(self) -> str | None:
        """Why the aux values that came do not do."""
        if not (missing := sorted(self.expected - self.aux.keys())):
            return None
        sent = ", ".join(sorted(self.aux)) or "none"
        reason = f"prefill sent no aux value {', '.join(missing)} (it sent: {sent})."
        if len(self.offered) == len(self.link.addresses):
            return reason
        reason += f" Of prefill's ranks only {', '.join(map(str, self.offered))} are asked here:"
        return f"{reason} send it from every rank."

    def new_reads(
        self, source: int, ready: ChunkReady, table: RequestAddress, now: float
    ) -> list[Read]:
        """What is to be read of a chunk, which lies at `table` on its rank."""
        plan, rank, some = self.link.plan, self.link.ranks[source], ready.layers
        if self.declined or plan is None or rank.hello is None:
            return []
        tokens = range(max(ready.start, self.start), max(ready.stop, self.start))
        # slots and rings come with the last position, also where decode has all the pages
        ends = ready.stop == self.table.num_tokens and ready.start < max(ready.stop, 1)
        wanted: list[tuple[range, LayerRange | None, Count]] = []
        layers, owner = (some.layers, some.owner) if some else (None, "")
        if plan.contributes(source, layers, owner):
            if self.at_most and tokens:
                wanted.append((tokens, some, Count.UNKNOWN))
            elif not self.at_most and (tokens or (ends and self.start == ready.stop)):
                wanted.append((tokens, some, Count.KNOWN))
        if self.at_most and ready.last and plan.needs_count(source):
            wanted.append((range(self.start, ready.stop), None, Count.LEARNED))
        reads = [
            Read(
                room=ready.room,
                attempt=self.attempt,
                rank=rank,
                hello=rank.hello,
                plan=plan,
                tokens=positions,
                layers=layers,
                source_address=table,
                dest_address=self.table,
                count=count,
                ready=now,
                arrived=self.arrived.get(source),
            )
            for positions, layers, count in wanted
        ]
        self.reads.update((read, ReadProgress()) for read in reads)
        return reads

    def note_chunk(self, source: int, ready: ChunkReady) -> RequestAddress | None:
        """Notes a chunk that a rank offers: its block table there, or None if nothing of it is new.
        Raises ValueError for a chunk that cannot be one.
        """
        chunk = source, ready.start, ready.stop, ready.last, ready.layers
        tokens, some, last = range(ready.start, ready.stop), ready.layers, ready.last
        offered = self.offered[source]
        # layers without a role on decode are not known here
        if chunk in self.seen or not (some is None or last or offered.holds(some)):
            return None
        if problem := offered.problem(tokens, some, last):
            raise ValueError(problem)
        if not self.declined and (problem := self._misfit(ready)):
            raise ValueError(problem)
        table = ready.block_table(*self.latest.pop(source, (None, None)))
        aux = unpack_aux(ready.aux)
        plan = self.link.plan
        if plan and (problem := id_clash(plan.sources[source], table)):
            raise ValueError(problem)
        if aux and not last:
            raise ValueError("aux values travel with the last chunk.")
        # packed, so that nan equals nan and 1 does not equal 1.0
        clash = [
            name
            for name in aux.keys() & self.aux.keys()
            if pack_aux({name: aux[name]}) != pack_aux({name: self.aux[name]})
        ]
        if clash:
            raise ValueError(f"ranks send different values of aux {', '.join(sorted(clash))}.")
        self.seen.add(chunk)
        if not last:
            self.latest[source] = ready, table
        offered.note_chunk(tokens, some, last)
        if last and (self.at_most or self.declined):
            self.table = replace(self.table, num_tokens=ready.stop)
        self.aux.update(aux)
        return table

    def _misfit(self, ready: ChunkReady) -> str | None:
        """Why the request cannot have as many tokens as a chunk says."""
        computed, total, last = ready.stop, self.table.num_tokens, ready.last
        if computed <= total and (not last or computed == total):
            return None
        if not self.at_most:
            reason = f"decode made room for {total}."
        elif closed := [source for source, offered in self.offered.items() if offered.closed]:
            reason = f"{self.link.ranks[closed[0]]} says {total}. Send the same tokens of a "
            reason += "request from all ranks."
        elif computed > total:
            reason = f"decode made room for at most {total}. Give `receive` a block table with "
            reason += f"room for {computed} or more."
        elif computed < self.start:
            reason = f"decode asked for those from position {self.start} on. Give `receive` a "
            reason += f"`start` of at most {computed}."
        else:
            return None
        return f"prefill computed {computed} tokens, {reason}"
