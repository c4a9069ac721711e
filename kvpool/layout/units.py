"""Sizes of memory as people write them."""

from __future__ import annotations

import re
from decimal import Decimal

MIN_BYTES = 1 << 20
"""The least memory that a number without a unit may say."""
MEMORY_UNITS = {"b": 1} | {
    prefix + suffix: base**power
    for suffix, base in (("b", 1000), ("", 1000), ("ib", 1024), ("i", 1024))
    for power, prefix in enumerate("kmgtp", 1)
}


def parse_memory(text: str, what: str = "memory") -> int:
    """Bytes of `141GiB` or `141Gi`, `80 GB` or `80G` (powers of 1,000), or without a unit of a
    whole number of MIN_BYTES or more. Raises ValueError for anything else, beginning with `what`.
    """
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([a-z]{0,3})", text.strip().lower())
    unit = MEMORY_UNITS.get(match[2] or "b") if match else None
    nbytes = int(Decimal(match[1]) * unit) if match and unit else 0
    if nbytes < 1:
        raise ValueError(
            f"{what} {text!r}: bytes, or a number of kB, MB, GB, TB, KiB, MiB, GiB or TiB, such as "
            "141GiB."
        )
    if match and not match[2] and nbytes < MIN_BYTES:  # 80 alone means GiB
        raise ValueError(
            f"{what} {text!r}: a number alone is bytes, of {MIN_BYTES:,} or more. Give its unit, "
            f"such as {match[1]}GiB, or b for bytes."
        )
    return nbytes


def human(nbytes: float) -> str:
    """`73728` as `72.0 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
