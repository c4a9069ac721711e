"""What bytes mean beside their layout: named numbers and short texts, which each side says of its
own state and the handshake compares.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from kvpool.layout.sentences import PRINTABLE, is_name
from kvpool.layout.types import MAX_NAME, Name

MAX_CONVENTIONS = 64
MAX_CONVENTION = 256

Convention = (
    Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
    | Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
    | Annotated[str, Meta(max_length=MAX_CONVENTION, pattern=PRINTABLE)]
)
Conventions = Annotated[dict[Name, Convention], Meta(max_length=MAX_CONVENTIONS)]


def checked_conventions(conventions: Mapping[str, Convention]) -> dict[str, Convention]:
    """What a caller says of its bytes, as it is sent; raises ValueError for what cannot be."""
    if not isinstance(conventions, Mapping):
        raise ValueError(f"conventions={conventions!r}: names, each with a number or a short text.")
    for name, value in conventions.items():
        if not is_name(name, MAX_NAME):
            raise ValueError(f"conventions: name {name!r}: 1 to {MAX_NAME} printable characters.")
        try:
            msgspec.convert(value, Convention)
        except msgspec.ValidationError:
            raise ValueError(
                f"conventions: {name}={value!r}: a number, or a text of at most {MAX_CONVENTION} "
                "printable characters."
            ) from None
    if len(conventions) > MAX_CONVENTIONS:
        raise ValueError(
            f"conventions: {len(conventions)} names, at most {MAX_CONVENTIONS} are sent."
        )
    return dict(conventions)


def differences(prefill: Mapping[str, Convention], decode: Mapping[str, Convention]) -> list[str]:
    """Why prefill's bytes do not mean the same to decode: names that the sides set differently."""
    return [
        f"{name}: {value!r} on prefill, {decode[name]!r} on decode. Run the same model with the "
        "same settings on both sides."
        for name, value in sorted(prefill.items())
        if name in decode and decode[name] != value
    ]
