"""Where an endpoint listens, as a user writes it.

    ipc://PATH              a unix socket; ipc://* a new one
    tcp://HOST:29100        a port
    tcp://HOST:29100-29107  the first of these that is free
    tcp://HOST:29100+rank   29100 and the rank's number, which connectors know
    tcp://HOST:*            a port that is free

HOST is an IP address (IPv6 in brackets), a host name, a network interface of this host (`eth0`), a
variable of the environment that holds one of these (`$POD_IP`), or `*` for all IPv4 addresses.
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass, replace
from typing import Any

from disagg.host.interfaces import interface_addresses, interface_names
from disagg.host.unix_sockets import MAX_PATH
from disagg.runtime.sockets.hosts import host_of, host_text, ip_address

FORMS = "ipc://PATH or tcp://HOST:PORT, with PORT one of 29100, 29100-29107, 29100+rank and *"
MAX_PORT = 65535
ANY_HOST = "0.0.0.0"
_TCP = re.compile(r"tcp://(\[[^\[\]]*\]|[^\[\]:/]+):(.+)")
_PORTS = re.compile(r"(\*)|([0-9]{1,5})(?:(\+rank)|-([0-9]{1,5}))?")
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))")

Place = tuple[socket.AddressFamily, Any]
"""A family, and a socket address of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenAddress:
    """A unix socket's `path` ("*": a new one), or a `host` of TCP ("$NAME": what this variable
    holds) with ports from `first` to `last`, both 0 for any. With `by_rank` the rank's number is to
    be added.
    """

    path: str = ""
    host: str = ""
    first: int = 0
    last: int = 0
    by_rank: bool = False

    @classmethod
    def parse(cls, text: str) -> ListenAddress:
        """Raises ValueError for what is no address."""
        if text.startswith("ipc://"):
            path = text.removeprefix("ipc://")
            check_path(path)
            return cls(path=path)
        match = _TCP.fullmatch(text)
        ports = match and _PORTS.fullmatch(match[2])
        if not match or not ports:
            raise ValueError(f"an address is {FORMS}")
        host = _host(match[1])
        first = 0 if ports[1] else int(ports[2])
        last = int(ports[4]) if ports[4] else first
        if max(first, last) > MAX_PORT:
            raise ValueError(f"a port is at most {MAX_PORT}")
        if last < first or (first == 0 and (last or ports[3])):
            raise ValueError(f"ports {match[2]}: from 1 on, the lower one first")
        return cls(host=host, first=first, last=last, by_rank=bool(ports[3]))

    def __str__(self) -> str:
        if self.path:
            return f"ipc://{self.path}"
        ports = f"{self.first}" if self.first else "*"
        if self.last != self.first:
            ports += f"-{self.last}"
        host = "*" if self.host == ANY_HOST else host_text(self.host)
        return f"tcp://{host}:{ports}{'+rank' if self.by_rank else ''}"

    def of_rank(self, number: int) -> ListenAddress:
        """The address of a rank. Raises ValueError if it has no such port."""
        if not self.by_rank:
            return self
        port = self.first + number
        if port > MAX_PORT:
            raise ValueError(f"{self}: port {port} of rank {number}: a port is at most {MAX_PORT}")
        return replace(self, first=port, last=port, by_rank=False)

    def ports(self) -> range:
        """Those to try, one after the other; 0 is any. Raises ValueError for a rank's."""
        if self.by_rank:
            raise ValueError(
                "this endpoint knows no number of its rank, which connectors add. Give it a port "
                f"of its own, such as {self.first}"
            )
        return range(self.first, self.last + 1)

    def hosts(self) -> list[str]:
        """IP addresses or a host name, the preferred one first: what the variable holds, and the
        addresses of the interface. Raises ValueError if there are none.
        """
        host = self.host
        if host.startswith("$"):
            name = host.removeprefix("$")
            if not (value := os.environ.get(name, "").strip()):
                raise ValueError(f"the environment has no {name}")
            try:  # Kubernetes gives IPv6 without brackets
                host = _host(value if ":" not in value else f"[{value.strip('[]')}]")
                if host.startswith("$"):
                    raise ValueError(f"{host} is a variable again")
            except ValueError as error:
                raise ValueError(f"{name}={value!r} of the environment: {error}") from None
        if host not in interface_names():
            ip_address(host)  # a name that only an interface can have
            return [host]
        addresses = interface_addresses(host)
        if not addresses:
            raise ValueError(f"interface {host} has no address")
        return addresses

    def places(self) -> list[Place]:
        """Where to listen with port 0. Raises ValueError, OSError or UnicodeError."""
        infos = [
            info
            for host in self.hosts()
            for info in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        ]
        return [(family, place) for family, _, _, _, place in infos]


def check_path(path: str) -> None:
    """Raises ValueError for what is no path of a unix socket."""
    if not path or "\0" in path:
        raise ValueError("a unix socket is ipc://PATH")
    if len(os.fsencode(path)) > MAX_PATH:
        raise ValueError(f"a unix socket's path has at most {MAX_PATH} bytes")


def _host(text: str) -> str:
    if text == "*":
        return ANY_HOST
    if text.startswith("$"):
        if not (match := _VARIABLE.fullmatch(text)):
            raise ValueError(f"{text!r} is no variable of the environment: $NAME or ${{NAME}}")
        return f"${match[1] or match[2]}"
    return host_of(text)
