"""Endpoint addresses of stream sockets, `ipc://PATH` and `tcp://HOST:PORT`, and where they lead."""

from __future__ import annotations

import os
import re
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from disagg.host.unix_sockets import MAX_PATH

_TCP = re.compile(r"tcp://(\[[^\[\]]+\]|[^\[\]:/]+):(\*|[0-9]{1,5})")
_IPC = "ipc://"
LOOKUP_SECONDS = 1.0
"""Between two look-ups of a name that leads nowhere."""

Place = tuple[socket.AddressFamily, Any]
"""A family, and a socket address of it."""


@dataclass(frozen=True, slots=True)
class Address:
    """A unix socket's `path`, or `host` and `port` of TCP; port 0 is any."""

    text: str
    path: str = ""
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises ValueError for what is no address."""
        if text.startswith(_IPC):
            path = text.removeprefix(_IPC)
            if not path or "\0" in path:
                raise ValueError("a unix socket is ipc://PATH")
            if len(os.fsencode(path)) > MAX_PATH:
                raise ValueError(f"a unix socket's path has at most {MAX_PATH} bytes")
            return cls(text, path=path)
        match = _TCP.fullmatch(text)
        if match is None:
            raise ValueError("an address is ipc://PATH or tcp://HOST:PORT")
        host, port = match[1].removeprefix("[").removesuffix("]"), match[2]
        number = 0 if port == "*" else int(port)
        if number > 65535:
            raise ValueError("a port is at most 65535")
        return cls(text, host="0.0.0.0" if host == "*" else host, port=number)

    @property
    def is_name(self) -> bool:
        """Whether `resolve` may ask another host, and so take long."""
        if self.path:
            return False
        try:
            socket.getaddrinfo(self.host, self.port, flags=socket.AI_NUMERICHOST)
        except OSError:
            return True
        return False

    def resolve(self) -> list[Place]:
        """Where it leads, the preferred place first. Raises OSError or UnicodeError for a
        name that is none.
        """
        if self.path:
            return [(socket.AF_UNIX, self.path)]
        places = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        return [(family, place) for family, _, _, _, place in places]


class DialledAddress:
    """An address that is dialled until somebody answers: one place after the other."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._places: list[Place] = []
        self._tried = 0
        self._look_up_at = 0.0
        self._thread: threading.Thread | None = None

    def next_place(self, now: float) -> Place | None:
        """Where to try; None while that is not known. Names are looked up by a thread."""
        if self._thread is not None and self._thread.is_alive():
            return None
        if not self._places and now >= self._look_up_at:
            self._look_up_at = now + LOOKUP_SECONDS
            if self.address.is_name:
                self._thread = threading.Thread(target=self._look_up, daemon=True)
                self._thread.start()
                return None
            self._look_up()
        if not self._places:
            return None
        self._tried += 1
        return self._places[(self._tried - 1) % len(self._places)]

    def _look_up(self) -> None:
        with suppress(OSError, UnicodeError):
            self._places = self.address.resolve()


def tcp_text(place: tuple[Any, ...]) -> str:
    """The endpoint address of a bound TCP socket."""
    host, port = place[0], place[1]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
