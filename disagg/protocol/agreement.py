"""What two sides must agree on before their layouts are planned: the handshake and `kvpool pair`
compare it here, and layouts by `disagg.plan`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from disagg.protocol.messages import Convention

NO_REGION = "decode's layout has no region: there is nothing to hand over to it."


class Party(Protocol):
    """What says how it speaks: a hello, or a contract."""

    @property
    def protocol(self) -> int: ...

    @property
    def engine(self) -> str: ...


def protocol_problems(prefill: Party, decode: Party) -> list[str]:
    """Why the two cannot read each other's messages."""
    if prefill.protocol == decode.protocol:
        return []
    return [
        f"protocol {prefill.protocol} on prefill, {decode.protocol} on decode. Run the same kvpool."
    ]


def engine_problems(prefill: Party, decode: Party) -> list[str]:
    """Why no bytes can move between the two."""
    if prefill.engine == decode.engine:
        return []
    return [
        f"engine {prefill.engine!r} on prefill, {decode.engine!r} on decode. Use the same on both "
        "sides."
    ]


def handshake_problems(prefill: Party, decode: Party) -> list[str]:
    """Why two endpoints cannot work together, whatever their layouts."""
    # of a hello of another protocol nothing else can be read
    return protocol_problems(prefill, decode) or engine_problems(prefill, decode)


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
