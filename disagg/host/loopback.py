"""Which hosts are this one."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether what is sent to a host name or IP address stays on this host. Of names only
    `localhost` does.
    """
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    mapped = isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None
    return address.is_loopback and not mapped
