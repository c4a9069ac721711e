"""Decode's endpoint.

decode = DecodeEndpoint(pool.layout, create_engine("local"))
decode.connect([prefill.address])
decode.receive(room, block_table)
decode.wait(room)                   # KVPoll.Success, or Failed with decode.failure(room)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from operator import index
from typing import Literal

from typing_extensions import Unpack

from disagg.engines.base import Engine, need_engine
from disagg.errors import HandshakeRefused, RoomError, UsageError
from disagg.host.signals import deferred_signals
from disagg.plan import Group
from disagg.protocol.codec import Aux
from disagg.protocol.decode import DecodeMachine
from disagg.protocol.events import Connect, ConnectLink, DisconnectLink, RequestRoom, Send
from disagg.protocol.messages import Room, room_name
from disagg.protocol.metrics import RoomMetrics
from disagg.protocol.peers.link import Link
from disagg.protocol.rooms.offered import layer_names, layers_by_owner
from disagg.protocol.status import KVPoll
from disagg.protocol.trace_context import checked_traceparent
from disagg.runtime.endpoint import Endpoint
from disagg.runtime.options import Options, check_values
from disagg.runtime.staging import staging_buffers
from kvpool.layout import PoolLayout, RequestAddress
from kvpool.layout.request_address import need_block_table
from kvpool.layout.text import is_name

READ_TIMEOUT = 30.0
OFFER_TIMEOUT = 300.0
STAGING_BYTES = 16 << 20
MAX_ADDRESS = 1024
NOTHING = RequestAddress(0, {})


class DecodeEndpoint(Endpoint[DecodeMachine]):
    """Reads what one decode rank needs. `ranks`: how many decode ranks read a room, or their Group.

    Without a group, every decode rank contacts every prefill rank. With one, it contacts the ranks
    that it reads from, and its share of those that no member reads from: four messages for each
    pair of ranks that moves bytes. The values of `aux` are then those of the ranks that it
    contacts. All members must have their group, and be alike in what Group says.

    A part of a read that takes longer than `read_timeout` seconds has failed. A room fails in which
    nothing happens for longer than `offer_timeout` seconds (None: it waits on): no chunk, no end of
    a read, no digest, no ack, counted from `receive`. `verify="checksum"` compares digests of all
    that was read with prefill's before a room succeeds. `allow_missing` names owners or roles that
    prefill may lack altogether (`"draft"`): their memory is left as it is. `cast` (True, or roles)
    lets prefill have rows in another format, which are converted as they arrive (docs/cast.md).
    `staging` bytes (0: none) are for small runs that lie close together on prefill, read as long
    ones and scattered from there (docs/engines.md). `options`: as of PrefillEndpoint.
    """

    def __init__(
        self,
        layout: PoolLayout,
        engine: Engine,
        *,
        ranks: int | Group = 1,
        read_timeout: float = READ_TIMEOUT,
        offer_timeout: float | None = OFFER_TIMEOUT,
        verify: Literal["checksum"] | None = None,
        allow_missing: Collection[str] = (),
        cast: bool | Collection[str] = False,
        staging: int = STAGING_BYTES,
        **options: Unpack[Options],
    ) -> None:
        self._layers = layers_by_owner(layout)
        if isinstance(ranks, Group):
            ranks.check(layout)
        else:
            check_values(ranks=ranks)
        need_engine(engine)
        check_values(
            read_timeout=read_timeout,
            offer_timeout=offer_timeout,
            verify=verify,
            allow_missing=allow_missing,
            cast=cast,
            staging=staging,
        )
        super().__init__(
            lambda hello, now: DecodeMachine(
                hello,
                self.layout,
                readers=ranks,
                verify=verify is not None,
                allow_missing=allow_missing,
                cast=cast,
                offer_timeout=offer_timeout,
                now=now,
            ),
            layout,
            engine,
            options,
            stage=staging_buffers(layout, engine, staging, always=bool(cast)),
            read_timeout=read_timeout,
        )
        self.driver.start()

    def connect(self, addresses: Sequence[str], timeout: float | None = None) -> Link:
        """Says hello to all ranks of one prefill, given their endpoint addresses.

        With `timeout` (seconds), waits until all have answered, everything is planned and the
        engine connected, and retries ranks that refuse temporarily; raises IncompatibleLayouts or
        HandshakeRefused with all reasons, or TimeoutError, and leaves nothing of the link. Without,
        returns at once: rooms wait in Bootstrapping, at most `peer_timeout` where no rank answers.
        """
        if isinstance(addresses, str) or not addresses:
            raise ValueError(f"connect: a list of one or more addresses, got {addresses!r}.")
        for address in addresses:  # one may come from a client, and the log has it
            if not is_name(address, MAX_ADDRESS):
                raise ValueError(
                    f"connect: address {address!r}: 1 to {MAX_ADDRESS} printable characters."
                )
        link = Link(tuple(addresses))
        try:
            with deferred_signals, self._loop.lock:
                self._loop.check_open()
                self._open(link)
                self.driver.call()
            if timeout is not None:
                self.handshake(link, timeout)
        except BaseException:
            with suppress(UsageError):  # closed, or disconnected by another thread
                self.disconnect(link)
            raise
        return link

    def _open(self, link: Link) -> None:
        loop = self._loop
        effects = self.machine.handle(ConnectLink(link), loop.clock())
        try:
            for effect in effects:
                if isinstance(effect, Connect):  # now: a bad address is the caller's error
                    loop.transport.connect(effect.peer, effect.address)
        except ValueError:
            effects = self.machine.handle(DisconnectLink(link), loop.clock())
            # not every rank was dialled
            loop.pending.extend(effect for effect in effects if not isinstance(effect, Send))
            raise
        loop.pending.extend(effect for effect in effects if not isinstance(effect, Connect))

    def handshake(self, link: Link, timeout: float) -> None:
        """Waits as `connect` does; the link stays."""
        if not self.driver.wait(lambda: link.settled, timeout):
            self._loop.check_open()
            silent = [a for a, hello in zip(link.addresses, link.hellos) if hello is None]
            who = ", ".join(silent) or "the engine"
            last = f" The last try: {link.lost}" if link.lost else ""
            raise TimeoutError(
                f"no answer from {who} within {timeout} s. Is it there, and are keys the same on "
                f"both sides?{last}"
            )
        if link.error is not None:
            raise link.error
        if link.refusal is not None:
            raise HandshakeRefused(link.refusal)

    def disconnect(self, link: Link) -> None:
        """Gives a prefill up for good; its rooms fail."""
        self.driver.call(DisconnectLink(link))

    def receive(
        self,
        room: Room,
        address: RequestAddress,
        *,
        start: int = 0,
        at_most: bool = False,
        link: Link | None = None,
        aux: Collection[str] = (),
        traceparent: str | None = None,
    ) -> None:
        """Asks for a room: positions `start` (the first that is lacking) to the end, to be read to
        the pages of the block table `address`.

        With `at_most`, `address.num_tokens` is how many tokens the pages have room for, not how
        many the request has: prefill's last chunk has that number, and `num_tokens(room)` after
        success. More than fit, fewer than `start`, and ranks with different numbers fail the room
        on both sides. Spaces without a window are
        read chunk by chunk. Windows, slots, rings and a packed page that is not full are read after
        a rank's last chunk, and no layer is ready before it. Of a window the block table lists
        every page that may be alive then; pages that are dead are not written.
        `Allocator.extend(request, room, at_most=True)` makes such a block table, and after success
        `Allocator.truncate(request, num_tokens(room))` gives back what did not come.

        `link` names the prefill, if several are connected. `aux` are names of values without which
        the room fails. The pages are leased until the room has ended and `reading(room)` is false,
        also after `abort`: `request.address()` pins its request as long, the pages of any other
        block table are yours to keep. Slots and rings come whole, for any `start`. Allocate
        with `Allocator.extend(..., received=True)`, which knows what is dead and will not come.
        `traceparent` is W3C's of the request, whose trace the spans of both sides join.

        Raises RoomError for a room that is there already, for items that another room writes (pages
        before `start` are only kept, and may be shared), and for a block table that lacks items of
        live positions from `start` on, that lists a reserved item or one outside the pool for them
        (with `at_most` items of a window are not looked at), or a block for two spaces of its pool;
        lists of owners or roles in `allow_missing` may be left out. Raises ValueError if the
        request is not what its block table says any more, or shares pages that would be written,
        and for a traceparent that is none; RequestPinned while another room offers or receives it.
        """
        if isinstance(aux, str):
            raise ValueError(f"aux={aux!r}: a list of names.")
        need_block_table(address)
        name = room_name(room)
        with deferred_signals, self._loop.lock:
            self._call_pinned(
                RequestRoom(
                    room=name,
                    table=address,
                    start=index(start),
                    link=link or self._only_link(name),
                    expected=aux,
                    at_most=at_most,
                    traceparent=checked_traceparent(traceparent),
                )
            )

    def decline(self, room: Room, link: Link | None = None) -> None:
        """Reads nothing of a room, as this decode has all of it: prefill's pages come back
        once it has sent its last chunk and every other reader is done or declines too.

        To be called in place of `receive`, before or after prefill has the room; `link` as there.
        The room ends as any: in Success, with prefill's aux values, or Failed; of those that have
        ended and were not forgotten the latest 1,000 are kept. Declining a room again changes
        nothing. Raises RoomError if the room is received already.
        """
        name = room_name(room)
        with deferred_signals, self._loop.lock:
            link = link or self._only_link(name)
            request = RequestRoom(room=name, table=NOTHING, start=0, link=link, declined=True)
            self.driver.call(request)

    def layer_ready(self, room: Room, layer: int, *, owner: str = "target") -> bool:
        """Whether all that the room lacks of a layer was read, from every rank that has any of it.
        The bytes are void if the room fails later. Raises RoomError for a layer that is not here.
        """
        self.driver.turn_for_caller()
        return self._layer_ready(room_name(room), index(layer), owner)

    def wait_layer(
        self, room: Room, layer: int, timeout: float | None = None, *, owner: str = "target"
    ) -> KVPoll:
        """Blocks until `layer_ready`, or until the room has failed; returns the room's state.

        Raises what `layer_ready` and `wait` do.
        """
        name, number = room_name(room), index(layer)
        return self._wait_in_room(
            name,
            lambda: self._layer_ready(name, number, owner) or self.machine.poll(name).ended,
            timeout,
        )

    def reading(self, room: Room) -> bool:
        """Whether a read may still write to the room's pages."""
        self.driver.turn_for_caller()
        with self._loop.lock:
            return self.machine.rooms.known(room_name(room)).reading

    def aux(self, room: Room) -> Aux:
        """The values that prefill sent along. Raises RoomError before the room has succeeded."""
        with self._loop.lock:
            return dict(self.machine.succeeded(room_name(room), "aux values are there").aux)

    def num_tokens(self, room: Room) -> int:
        """How many tokens the request has. Raises RoomError before the room has succeeded."""
        with self._loop.lock:
            what = "how many tokens it has is known"
            return self.machine.succeeded(room_name(room), what).table.num_tokens

    def metrics(self, room: Room) -> RoomMetrics:
        """What has been moved so far, and what that took."""
        with self._loop.lock:
            return self.machine.rooms.known(room_name(room)).metrics.copy()

    def _layer_ready(self, name: Room, layer: int, owner: str) -> bool:
        if layer not in self._layers.get(owner, ()):
            layers = layer_names(self._layers)
            raise RoomError(f"room {name!r}: {owner} layer {layer} is not here, but {layers}.")
        with self._loop.lock:
            return self.machine.rooms.known(name).layer_ready(owner, layer)

    def _only_link(self, name: Room) -> Link:
        links = self.machine.peers.links
        if len(links) != 1:
            cure = "name one by link=" if links else "call connect first"
            raise RoomError(f"room {name!r}: {len(links)} prefills are connected: {cure}.")
        return links[0]
