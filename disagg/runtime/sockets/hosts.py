"""Hosts in addresses of TCP: as they are written, and which of them can be dialled."""

from __future__ import annotations

import ipaddress
import re

# underscores are in names of containers
NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")
_BROADCAST = ipaddress.IPv4Address("255.255.255.255")

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def ip_address(host: str) -> IPAddress | None:
    """The IP address that a host without brackets is, IPv4 written as IPv6 as IPv4; None: a name.

    Raises ValueError for what the system would take for an address in another spelling: "1.2" would
    lead to 1.0.0.2.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        if ":" in host or _NUMBER.fullmatch(host.rpartition(".")[2]):
            raise ValueError(f"{host} is no IP address") from None
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def is_wildcard(host: str) -> bool:
    """Whether it stands for all addresses of a host."""
    address = ip_address(host)
    return address is not None and address.is_unspecified


def check_dialled(host: str) -> None:
    """Raises ValueError for a host that cannot be dialled."""
    address = ip_address(host)
    if address is None:
        return
    if address.is_unspecified:
        raise ValueError(
            f"{host} stands for all addresses of the host that listens, and leads a peer to itself"
        )
    if address.is_multicast or address == _BROADCAST:
        raise ValueError(f"{host} is no address of one host")


def host_of(text: str) -> str:
    """A host as an address writes it, without the brackets of IPv6. Raises ValueError."""
    if text.startswith("["):
        host = text[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise ValueError(f"{text} is no IPv6 address") from None
        return host
    if not NAME.fullmatch(text):
        raise ValueError(f"{text!r} is no host name")
    return text


def host_text(host: str) -> str:
    """A host as an address writes it."""
    return f"[{host}]" if ":" in host else host
