"""Decode's part of a check: contracts, the handshake with running ranks, and bytes from a check."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, field

from disagg.cli.check.memory import CheckMemory, most_tokens
from disagg.cli.check.offer import endpoint_options
from disagg.cli.check.reach import reach
from disagg.cli.check.rooms import CheckRooms, Moved, Refused, Tell
from disagg.connectors.settings import Settings
from disagg.contract.fit import Fit, Objection
from disagg.engines.base import EngineUnavailable, TransferError
from disagg.errors import HandshakeRefused
from disagg.plan import IncompatibleLayouts
from disagg.protocol.peers.link import Link
from disagg.runtime.decode_endpoint import DecodeEndpoint
from kvpool.device import DeviceUnavailable

PrefillOpener = Callable[[], AbstractContextManager[Sequence[str]]]
"""A block in which prefill's part of a check serves, with its addresses."""

LOOK = 0.1
"""Seconds between two looks at how far a room is."""
MOST_TRIED = 4
"""Addresses that are tried by themselves when there is no handshake."""
UNABLE = (EngineUnavailable, DeviceUnavailable, TransferError, MemoryError)


@dataclass(kw_only=True)
class Check:
    """Of two contracts that were read. Without a `source` no bytes are moved. No wait is longer
    than `timeout` seconds.
    """

    fit: Fit
    settings: Settings
    source: PrefillOpener | None
    nbytes: int
    timeout: float
    device: str | None
    objections: list[Objection] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    greeted: list[str] = field(default_factory=list)
    moved: Moved | None = None

    def run(self, tell: Tell) -> None:
        """Fills in what was found."""
        self.objections += self.fit.objections()
        contracts = self.fit.prefill.engine, self.fit.decode.engine
        if contracts[0] == contracts[1] != self.settings.engine:
            self._refuse(
                "engine",
                f"engine {self.settings.engine!r} by --settings, {contracts[0]!r} by the "
                "contracts. Give the check what the servers have.",
            )
        ranks = self.fit.decode.ranks
        received = self.fit.hand_off.received()
        number = max(received, key=lambda n: received[n], default=0)
        try:
            tokens = most_tokens([rank.layout for rank in self.fit.prefill.ranks])
            memory = CheckMemory.of(ranks[number].layout, tokens, self.device)
            with closing(self._endpoint(memory, number)) as endpoint:
                self._greet(endpoint)
                if self.objections:
                    self.unchecked.append("bytes, for the reasons above.")
                elif self.source is None:
                    self.unchecked.append(
                        "bytes and the engine's ports: prefill is on another host. Give --from, "
                        "with `kvpool check --serve` there."
                    )
                else:
                    with self.source() as addresses:
                        self._move(endpoint, memory, addresses, tell)
        except Refused as refused:
            self._refuse(refused.about, str(refused))
        except UNABLE as error:
            self._refuse("engine", str(error))
        except ValueError as error:  # keys that cannot be read
            self._refuse("settings", str(error))

    def _endpoint(self, memory: CheckMemory, number: int) -> DecodeEndpoint:
        options = self.settings.options(self.fit.decode.ranks[number].conventions)
        return DecodeEndpoint(
            memory.layout,
            self.settings.new_engine(),
            verify="checksum",
            read_timeout=self.timeout,
            offer_timeout=self.timeout,
            allow_missing=self.fit.decode.allow_missing,
            cast=self.fit.decode.cast,
            **endpoint_options(self.settings, options),
        )

    def _greet(self, endpoint: DecodeEndpoint) -> None:
        """Shakes hands with the ranks that run, and leaves them."""
        addresses = [rank.address for rank in self.fit.prefill.ranks if rank.address is not None]
        if len(addresses) < len(self.fit.prefill.ranks):
            self.unchecked.append(
                "the handshake with prefill's ranks: its contract names no TCP addresses, so that "
                "only decodes on its host can dial them."
            )
            return
        try:
            endpoint.disconnect(_connected(endpoint, addresses, self.timeout))
            self.greeted = addresses
        except Refused as refused:
            # what contracts say is told already
            if refused.about == "network" or not self.objections:
                self._refuse(refused.about, str(refused))

    def _move(
        self, endpoint: DecodeEndpoint, memory: CheckMemory, addresses: Sequence[str], tell: Tell
    ) -> None:
        link = _connected(endpoint, addresses, self.timeout)
        if link.plan is None:
            raise RuntimeError("a link that is connected has a plan.")
        rooms = CheckRooms(endpoint=endpoint, memory=memory, link=link, plan=link.plan)
        if rooms.bytes_of(memory.tokens):
            self.moved = rooms.move(self.nbytes, self.timeout, tell)
        else:
            self.unchecked.append("bytes: none travel to this rank of decode.")

    def _refuse(self, about: str, reason: str) -> None:
        sides = self.fit.hand_off
        self.objections.append(
            Objection(about, sides.prefill.words(), sides.decode.words(), reason)
        )


def _connected(endpoint: DecodeEndpoint, addresses: Sequence[str], timeout: float) -> Link:
    """Shakes hands. Unlike an engine it gives up once a connection has failed."""
    until = time.monotonic() + timeout
    try:
        link = endpoint.connect(addresses)
        while not link.settled and link.lost is None and time.monotonic() < until:
            with suppress(TimeoutError):
                endpoint.handshake(link, LOOK)
        if link.settled:
            endpoint.handshake(link, 0.0)
            return link
    except (HandshakeRefused, IncompatibleLayouts) as error:
        raise Refused("handshake", error) from None
    except ValueError as error:
        raise Refused("address", error) from None
    silent = [a for a, hello in zip(addresses, link.hellos) if hello is None] or addresses
    lost = link.lost or f"no answer within {timeout:g} s."
    endpoint.disconnect(link)
    met = [f"{address}: {reach(address, timeout)}" for address in silent[:MOST_TRIED]]
    raise Refused("network", " ".join([lost, *met]))
