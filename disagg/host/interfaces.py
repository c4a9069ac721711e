"""Addresses of this host: those of its network interfaces, and the one of its default route."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from contextlib import suppress
from pathlib import Path

SIOCGIFADDR = 0x8915
"""netdevice(7): the IPv4 address of an interface."""
GLOBAL = "00"
"""The scope of an address in /proc/net/if_inet6 that has a meaning beyond its link."""
# of documentation (RFC 5737, RFC 3849): they lie behind the default route, and nothing is sent
BEYOND = {socket.AF_INET: "198.51.100.1", socket.AF_INET6: "2001:db8::1"}


def interface_names() -> list[str]:
    """The network interfaces of this host, loopback among them."""
    return [name for _, name in socket.if_nameindex()]


def interface_addresses(name: str) -> list[str]:
    """An interface's own IPv4 address, then its IPv6 addresses without those of its link."""
    addresses = []
    request = struct.pack("256s", name.encode()[:15])
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, SIOCGIFADDR, request)
        addresses.append(socket.inet_ntoa(answer[20:24]))
    with suppress(OSError):  # a host without IPv6 has no such file
        for line in Path("/proc/self/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, interface = line.split()
            if interface == name and (scope == GLOBAL or name == "lo"):
                addresses.append(str(ipaddress.IPv6Address(bytes.fromhex(digits))))
    return addresses


def source_towards(host: str) -> str | None:
    """The address of this host from which packets to an IP address or a name leave; None if the
    name is not known, or without a route.
    """
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # of a datagram socket this only chooses the route
            source: str = probe.getsockname()[0]
            return source
    except (OSError, UnicodeError):
        return None


def is_own(host: str) -> bool:
    """Whether an IP address, or the first one of a name, is this host's."""
    with suppress(OSError, UnicodeError):
        address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0][4][0]
        return is_loopback(str(address)) or source_towards(str(address)) == address
    return False


def outward_address(families: tuple[socket.AddressFamily, ...]) -> str:
    """The address by which other hosts reach this one: the default route's, else the only one. The
    first of `families` that has one counts. Raises ValueError if there is none, or no telling.
    """
    for family in families:
        address = source_towards(BEYOND[family])
        if address is not None and not is_loopback(address):
            return address
    addresses = sorted(
        address
        for name in interface_names()
        for address in interface_addresses(name)
        if not is_loopback(address) and _family(address) in families
    )
    if len(addresses) == 1:
        return addresses[0]
    if addresses:
        raise ValueError(f"it has no default route, and several addresses: {', '.join(addresses)}")
    raise ValueError("it has no address but those of loopback")


def is_loopback(host: str) -> bool:
    """Whether what is sent to a host stays on this one; of names only `localhost` does."""
    address = _ip_address(host)
    return host == "localhost" if address is None else address.is_loopback


def leads_back(host: str) -> bool:
    """Whether a host that is dialled leads back to the caller: loopback, and the address of all."""
    address = _ip_address(host)
    return is_loopback(host) or (address is not None and address.is_unspecified)


def _ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
