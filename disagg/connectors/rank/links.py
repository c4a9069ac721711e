"""The prefills that a decode rank reads from, by the addresses that come with its requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from disagg.errors import RoomError
from disagg.protocol.peers.link import Link
from disagg.runtime.decode_endpoint import DecodeEndpoint

DEAD_SECONDS = 10.0
"""How long an unused link is kept if its prefill is gone or was refused: a later one says hello."""
UNUSED_SECONDS = 120.0
"""And if its prefill answers: its pings then cost as much as a hello would (docs/scale.md)."""


@dataclass(slots=True)
class _Used:
    """A link, and when it was last in use and not dead (its prefill gone or refused)."""

    link: Link
    used_at: float

    @property
    def dead(self) -> bool:
        return self.link.lost is not None or self.link.refusal is not None


class Links:
    """Links of one endpoint: made where there is none, closed where one is of no more use."""

    def __init__(self, decode: DecodeEndpoint, clock: Callable[[], float] = time.monotonic) -> None:
        self.decode, self._clock = decode, clock
        self._links: dict[tuple[str, ...], _Used] = {}

    def to(self, addresses: tuple[str, ...]) -> Link:
        """The link to a prefill's ranks. Raises ValueError for an address that is none."""
        used = self._links.get(addresses)
        if used is None:
            used = self._links[addresses] = _Used(self.decode.connect(addresses), self._clock())
        elif not used.dead:
            used.used_at = self._clock()
        return used.link

    def alive(self, addresses: tuple[str, ...]) -> bool:
        """Whether there is a link to a prefill's ranks, and none of them is gone."""
        return addresses in self._links and not self._links[addresses].dead

    def close_unused(self, reading: Collection[Link]) -> None:
        """Closes links, dead or old, but those that open rooms use (`reading`)."""
        now = self._clock()
        for addresses, used in list(self._links.items()):
            if used.link in reading:
                used.used_at = used.used_at if used.dead else now
            elif now - used.used_at > (DEAD_SECONDS if used.dead else UNUSED_SECONDS):
                del self._links[addresses]
                with suppress(RoomError):  # it was disconnected already
                    self.decode.disconnect(used.link)
