"""Why no peer answered at an address: tested on the network alone, after the time-out."""

from __future__ import annotations

import socket

from disagg.runtime.sockets.address import Address

SECONDS = 3.0


def reach(address: str, timeout: float) -> str:
    """What a plain connection meets there, in a few seconds at most."""
    host, seconds = Address.parse(address), min(timeout, SECONDS)
    try:
        with socket.create_connection((host.host, host.port), timeout=seconds):
            return (
                "it accepts connections: is it of kvpool, and do both sides have keys of one "
                "authority?"
            )
    except TimeoutError:
        return f"no reply in {seconds:g} s: a firewall drops packets, or no such host is there."
    except ConnectionRefusedError:
        return "connection refused: its host is there, and nothing listens at this port."
    except socket.gaierror as error:
        return f"no address is known for its name: {error.strerror}."
    except (OSError, UnicodeError) as error:
        return f"{getattr(error, 'strerror', None) or error}."
