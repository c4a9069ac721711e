"""Prefill's endpoint.

prefill = PrefillEndpoint(pool.layout, create_engine("local"))
prefill.send(room, block_table, tokens=range(0, n), last=True, aux={"first_token": 7})
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import Unpack

from disagg.engines.base import Engine, need_engine
from disagg.host.signals import deferred_signals
from disagg.protocol.codec import Aux
from disagg.protocol.events import OfferChunk, RejectRoom
from disagg.protocol.messages import Room, room_name
from disagg.protocol.prefill import PrefillMachine
from disagg.protocol.rooms.offered import layer_range
from disagg.runtime.endpoint import Endpoint
from disagg.runtime.options import Options, check_values
from disagg.runtime.sockets.offered import host_in, offered_address
from disagg.runtime.transport import Transport
from kvpool.layout import PoolLayout, RequestAddress
from kvpool.layout.request_address import need_block_table

if TYPE_CHECKING:
    from kvpool.device import Event

LEASE_SECONDS = 300.0


class PrefillEndpoint(Endpoint[PrefillMachine]):
    """Offers what one prefill rank computes. `address` is the endpoint address to dial. It listens
    at `bind` (docs/addresses.md), or at a new unix socket of this host (with keys: a new port of
    loopback), and is known to peers as `advertise`, if that is another address of TCP.

    A room is Bootstrapping until a decode asks for it. `abort` frees its pages at once. The lease
    of what was sent ends `lease` seconds after the room's last chunk or request (None: never): the
    room fails, its pages are free, and a reader that is late is told that its read is void.
    `options`: `peer_timeout` (10 seconds), `keys`, `tls`, `insecure`, `threaded`, `conventions`,
    `transport` and `clock`, as the API reference says of disagg.runtime.options.Options.
    """

    address: str

    def __init__(
        self,
        layout: PoolLayout,
        engine: Engine,
        bind: str | None = None,
        *,
        advertise: str | None = None,
        lease: float | None = LEASE_SECONDS,
        **options: Unpack[Options],
    ) -> None:
        need_engine(engine)
        check_values(lease=lease)
        plain = options.get("keys") is None and options.get("tls") is None
        place = bind or ("ipc://*" if plain else "tcp://127.0.0.1:*")

        def listen(transport: Transport) -> None:
            self.address = offered_address(place, transport.bind(place), advertise)
            # before the engine says where it is read
            if (host := host_in(self.address)) is not None:
                engine.reached_at(host)

        super().__init__(
            lambda hello, now: PrefillMachine(hello, self.layout, lease, now=now),
            layout,
            engine,
            options,
            listen=listen,
        )
        self.driver.start()

    def send(
        self,
        room: Room,
        address: RequestAddress,
        *,
        tokens: range | None = None,
        layers: range | None = None,
        owner: str = "target",
        last: bool = True,
        aux: Aux | None = None,
        after: Event | None = None,
    ) -> None:
        """Offers positions `tokens` (default: all not yet sent) of the request whose block table is
        `address`, to every decode that asks for `room`.

        Chunks come in order, any number of them; `aux` travels with the last. Where a device
        computes them, `after=pool.device.record()` offers them once its work has ended; without,
        it must have. From the first chunk on the pages are leased until `poll(room)` says Success
        or Failed: `request.address()` pins its request as long (docs/connectors.md says what that
        refuses), the pages of any other block table are yours to keep.

        With `layers`, a range of layer numbers of `owner`, only what this rank holds of them is
        offered, as soon as it is computed: the same chunk is sent in parts, in any order, until
        each layer was sent once; `last` goes with the last part of the last chunk. Slots and rings
        of a layer come with its part of the chunk that holds the last position.

        Raises RoomError for a chunk that does not follow the one before, for layers that were sent
        already, that are not here, or that are left out, and for a block table that lacks pages of
        live positions of the chunk, that lists a reserved item or one outside the pool for them, or
        a block for two spaces of its pool; ValueError if the request is not what its block table
        says any more, RequestPinned while a room receives it.
        """
        need_block_table(address)
        name, some = room_name(room), layer_range(layers, owner)
        with deferred_signals, self._loop.lock:
            start = self.machine.computed(name)
            chunk = range(start, address.num_tokens) if tokens is None else tokens
            self._call_pinned(
                OfferChunk(
                    room=name,
                    table=address,
                    tokens=chunk,
                    last=last,
                    aux=aux or {},
                    after=after,
                    layers=some,
                )
            )

    def reject(self, room: Room, reason: str) -> None:
        """Ends a room that has not ended, as `abort` does, also one that no side knows yet: a
        decode that asks for it is told the reason. For a request that will not be sent at all.
        """
        self.driver.call(RejectRoom(room_name(room), reason))

    def refusals(self) -> list[str]:
        """Reasons of the decodes, the latest hundred, that could not work with this prefill."""
        with self._loop.lock:
            return list(self.machine.peers.refusals)
