"""What two sides must agree on before their layouts are planned: the handshake and `kvpool pair`
compare it here, and layouts by `disagg.plan`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from disagg.protocol.messages import Convention, Hello
from disagg.protocol.peers.counts import RefusalKind
from disagg.protocol.versions import EARLIER, fields_lacked, mismatch, spoken

NO_REGION = "decode's layout has no region: there is nothing to hand over to it."


class Party(Protocol):
    """What says how it speaks: a hello, or a contract."""

    @property
    def protocol(self) -> int: ...

    @property
    def engine(self) -> str: ...


def common_protocol(prefill: Party, decode: Party) -> int | None:
    """The highest number that both speak; None if there is none."""
    return max({*spoken(prefill.protocol)} & {*spoken(decode.protocol)}, default=None)


def protocol_problems(prefill: Party, decode: Party) -> list[str]:
    """Why the two cannot read each other's messages."""
    if common_protocol(prefill, decode) is not None:
        return []
    return [
        f"protocol {prefill.protocol} on prefill, {decode.protocol} on decode, and each speaks the "
        f"{EARLIER} numbers before its own too. Run the same release on both sides, or one and the "
        "next."
    ]


def engine_problems(prefill: Party, decode: Party) -> list[str]:
    """Why no bytes can move between the two."""
    if prefill.engine == decode.engine:
        return []
    return [
        f"engine {prefill.engine!r} on prefill, {decode.engine!r} on decode. Use the same on both "
        "sides."
    ]


def unsaid_conventions(own: Mapping[str, Convention], protocol: int) -> list[str]:
    """Why a side with these conventions works with none that speaks a protocol without any: such a
    peer may mean anything, where one that says nothing had the choice.
    """
    if not own or "conventions" not in fields_lacked("hello", protocol):
        return []
    return [
        f"conventions ({', '.join(sorted(own))}): protocol {protocol}, which the other side "
        "speaks, has none, so what bytes mean cannot be compared. Run the same release on both "
        "sides, or give this side conventions={}."
    ]


def handshake_problems(prefill: Hello, decode: Hello, own: Hello) -> list[str]:
    """Why two endpoints cannot work together with any layouts; one of the hellos is this side's
    `own`.
    """
    if prefill.protocol != decode.protocol:  # nothing else can be read
        return [mismatch(own.protocol, (decode if own is prefill else prefill).protocol)]
    return engine_problems(prefill, decode) or unsaid_conventions(own.conventions, own.protocol)


def handshake_kind(prefill: Hello, decode: Hello) -> RefusalKind:
    """What kind the `handshake_problems` of two endpoints are, of two that have any."""
    if prefill.protocol != decode.protocol:
        return "protocol"
    return "engine" if engine_problems(prefill, decode) else "conventions"


def differences(prefill: Mapping[str, Convention], decode: Mapping[str, Convention]) -> list[str]:
    """Why prefill's bytes do not mean the same to decode: names that the sides set differently."""
    return [
        f"{name}: {value!r} on prefill, {decode[name]!r} on decode. Run the same model with the "
        "same settings on both sides, in the same engine where it is the engine that decides."
        for name, value in sorted(prefill.items())
        if name in decode and decode[name] != value
    ]


def all_differences(
    prefills: Iterable[Mapping[str, Convention]], decode: Mapping[str, Convention]
) -> list[str]:
    """The differences of a decode rank from any rank of prefill, each once."""
    return list(
        dict.fromkeys(text for prefill in prefills for text in differences(prefill, decode))
    )
