"""Prefill's endpoint where the wire is the narrow place: what it computes is converted into a pool
of decode's format, and that is offered.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from disagg.engines.base import Engine
from disagg.portable.converted_offers import ConvertedOffers
from disagg.protocol.codec import Aux
from disagg.protocol.messages import Room, room_name
from disagg.runtime.prefill_endpoint import PrefillEndpoint
from kvpool.layout import PoolLayout, RequestAddress

if TYPE_CHECKING:
    from kvpool.device import Event


class ConvertingPrefill(PrefillEndpoint):
    """A PrefillEndpoint over `offered`, the layout of a pool in another format, in whose pages are
    as many tokens as in `layout`'s. `send` takes block tables of `layout`'s pool: when it returns,
    that chunk's pages may be used again. Those of `offered` are free once a room is forgotten.
    `memory` is kept as long as the endpoint is.
    """

    def __init__(
        self,
        layout: PoolLayout,
        offered: PoolLayout,
        engine: Engine,
        bind: str | None = None,
        *,
        cast: bool | Collection[str] = True,
        memory: object = None,
        **options: Any,
    ) -> None:
        self._memory = memory
        self._offers = ConvertedOffers(layout, offered, cast=cast)
        super().__init__(offered, engine, bind, **options)

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
        """As PrefillEndpoint.send. Waits for `after`, and raises OutOfPages where the pool that is
        offered has no room for the request.
        """
        name = room_name(room)
        with self._loop.lock:
            start = self.machine.computed(name)
        chunk = range(start, address.num_tokens) if tokens is None else tokens
        if after is not None:
            after.synchronize()
        offered = self._offers.convert(name, address, chunk, layers=layers, owner=owner)
        super().send(
            room, offered, tokens=chunk, layers=layers, owner=owner, last=last, aux=aux, after=None
        )

    def forget(self, room: Room) -> None:
        super().forget(room)
        self._offers.free(room_name(room))

    @property
    def num_free(self) -> dict[str, int]:
        """How many items of the pool that is offered are free, by id list."""
        return self._offers.num_free
