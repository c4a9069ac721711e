"""Which protocols a kvpool speaks, and what each of them added: its own number and `EARLIER` before
it. docs/protocol.md (Versions) says what follows for a peer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct

# Raise it with any change to the fields, tag or meaning of a message or of a layout in a hello, and
# to how digests are computed. What is new goes into ADDED, and its bytes into tests/compat.
PROTOCOL = 8
EARLIER = 2
"""How many numbers before its own a kvpool speaks."""

# By number, what it added: a message's tag, `tag.field`, or `space.field` of a layout. A new field
# of a message is empty, None or False unless it is used. What came before the numbers listed:
# 1: hello, request, chunk, done, abort
# 2: silence, leases, restarts (generations and attempts), digests
# 3: the messages have the names and tags of today
# 4: refusals that pass (`Refuse.final`), `Disconnect`, the bound of a request (`timeout`)
# 5: chunks of some layers (`layers`), digests of positions that ranks share out
# 6: `DropRoom`
ADDED: Mapping[int, frozenset[str]] = {
    8: frozenset({"read_request.traceparent"}),
    7: frozenset({"hello.conventions"})
    | {f"space.{name}" for name in ("items_per_block", "partial", "ring", "whole")},
}
_REFUSED = re.compile("protocol ([0-9]{1,9}) here, ")


def spoken(own: int) -> range:
    """The numbers that a kvpool of number `own` speaks."""
    return range(own - EARLIER, own + 1)


def lacked_by(protocol: int) -> frozenset[str]:
    """What later numbers have and this one does not, named as in ADDED."""
    return frozenset[str]().union(*(names for number, names in ADDED.items() if number > protocol))


LACKED = {number: lacked_by(number) for number in spoken(PROTOCOL)}


def fields_lacked(part: str, protocol: int) -> list[str]:
    """Fields of a message, by its tag, or of a `space` that peers of that number do not know."""
    prefix = f"{part}."
    names = LACKED.get(protocol, ())
    return [name.removeprefix(prefix) for name in sorted(names) if name.startswith(prefix)]


def tag_of(message: Struct) -> str:
    return str(message.__struct_config__.tag)


def lacks(message: Struct, protocol: int) -> bool:
    """Whether a number has no such message."""
    return protocol != PROTOCOL and tag_of(message) in LACKED.get(protocol, ())


def excess(message: Struct, protocol: int) -> str | None:
    """Why a peer of that number cannot have sent a message; None if it can."""
    if protocol == PROTOCOL:
        return None
    tag = tag_of(message)
    fields = [name for name in fields_lacked(tag, protocol) if getattr(message, name)]
    if not fields and not lacks(message, protocol):
        return None
    what = ", ".join(f"{tag}.{name}" for name in fields) or tag
    return f"malformed message: protocol {protocol}, which it speaks, has no {what}."


def mismatch(own: int, peer: int) -> str:
    """Why a hello of number `peer` is refused. Every release begins so: `named_in` reads it."""
    numbers = spoken(own)
    return (
        f"protocol {own} here, {peer} there. This kvpool speaks {numbers[0]} to {numbers[-1]}: run "
        "the same release on both sides, or one and the next."
    )


def named_in(refusal: str) -> int | None:
    """The number that a refusal of a hello for its number names: that of the refusing side."""
    match = _REFUSED.match(refusal)
    return int(match[1]) if match else None
