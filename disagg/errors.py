"""Errors of the hand-off, by whose mistake it is. Each is also the built-in error of its kind."""

from __future__ import annotations


class UsageError(Exception):
    """The caller's mistake: a call out of order, or a value that cannot be. Nothing has changed."""


class PeerError(Exception):
    """The peer's fault: it broke the protocol, its layout does not fit, or it cannot be read."""


class EndpointClosed(UsageError, RuntimeError):
    """The endpoint is closed and takes no more calls."""


class EndpointDraining(UsageError, RuntimeError):
    """The endpoint drains: it takes no new rooms, and ends those that are open."""


class RoomError(UsageError, ValueError):
    """A call that the room's phase does not allow, or values that do not fit the room."""


class UnknownRoom(UsageError, KeyError):
    """No room of this name is known here, or it was forgotten. `DecodeEndpoint.receive` makes a
    room known to decode; `PrefillEndpoint.send`, or a decode that asks for it, to prefill.
    """

    __str__ = Exception.__str__


class HandshakeRefused(PeerError, RuntimeError):
    """Prefill and decode cannot work together; the message gives all reasons."""


class WireError(PeerError, ValueError):
    """A message that is malformed, too large, or of another protocol."""
