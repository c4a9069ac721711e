"""The address that a listening endpoint offers to its peers, which a host of theirs can dial."""

from __future__ import annotations

import socket

from disagg.engines.base import Engine, TransferError
from disagg.host.interfaces import is_loopback, is_own, leads_back, outward_address
from disagg.log import log
from disagg.runtime.sockets.address import Address, tcp_text
from disagg.runtime.sockets.hosts import ip_address, is_wildcard
from disagg.runtime.sockets.listen_address import ListenAddress

_CHOICE = 'say which in advertise ("tcp://HOST:*"), or bind one of this host\'s addresses'


def offered_address(bind: str, bound: str, advertise: str | None) -> str:
    """What peers dial of an endpoint that was to listen at `bind` and listens at `bound`.

    Without `advertise` (a port `*` is the bound one) it is `bound`, and of all addresses that of
    the default route, or else the only one beside loopback. Raises ValueError where a peer on
    another host would be led to itself, or nowhere.
    """
    if not bound.startswith("tcp://"):
        if advertise is not None:
            raise ValueError(
                f"advertise={advertise!r}: this endpoint listens at {bound}, which is known by no "
                "other address. Bind one of TCP, or leave advertise out."
            )
        return bound
    listener = ListenAddress.parse(bound)
    try:
        if advertise is not None:
            return _advertised(ListenAddress.parse(advertise), listener.first)
        return _reachable(ListenAddress.parse(bind), listener)
    except (OSError, ValueError) as error:
        option = f"bind {bind!r}" if advertise is None else f"advertise={advertise!r}"
        raise ValueError(f"{option}: {str(error).rstrip('.')}.") from None


def host_in(address: str) -> str | None:
    """The host of an endpoint address of TCP; None of any other."""
    return Address.parse(address).host if address.startswith("tcp://") else None


def check_engine_host(address: str, engine: Engine, metadata: bytes) -> None:
    """Raises TransferError if a prefill was dialled at `address` on another host, and its engine
    names a host that is this one when it is dialled from here.
    """
    host = engine.offered_host(metadata)
    if host is None or not leads_back(host):
        return
    dialled = host_in(address)
    # over a tunnel it is dialled at loopback, and so may the engine be
    if dialled is not None and not is_own(dialled):
        raise TransferError(
            f"its engine {engine.name} is offered at {host}, which is this host; its endpoint is "
            f"at {dialled}. Leave hostname out of its engine options, or give another."
        )


def _advertised(address: ListenAddress, port: int) -> str:
    if address.path:
        raise ValueError("an endpoint of TCP is known by none but tcp://HOST:PORT")
    if address.last != address.first:
        raise ValueError("peers dial one port: name it, or * for the bound one")
    ports = address.ports()
    return Address.parse(tcp_text((address.hosts()[0], ports[0] or port))).text


def _reachable(asked: ListenAddress, listener: ListenAddress) -> str:
    host, port = listener.host, listener.first
    if is_wildcard(host):
        families = (socket.AF_INET6, socket.AF_INET) if ":" in host else (socket.AF_INET,)
        try:
            address = tcp_text((outward_address(families), port))
        except ValueError as error:
            raise ValueError(
                f"peers cannot be told where this host is: {error}. If they are on other hosts, "
                f"{_CHOICE}"
            ) from None
        log.info(
            "%s is offered to peers as %s (default route; else: advertise).", listener, address
        )
        return address
    if _of_link(host):
        raise ValueError(f"{host} means another host on each link: {_CHOICE}")
    name = asked.hosts()[0]
    if is_loopback(host) and ip_address(name) is None and not is_loopback(name):
        raise ValueError(
            f"{name} is {host} here, which leads a peer on another host to itself: {_CHOICE}"
        )
    return tcp_text((host, port))


def _of_link(host: str) -> bool:
    address = ip_address(host)
    return address is not None and address.version == 6 and address.is_link_local
