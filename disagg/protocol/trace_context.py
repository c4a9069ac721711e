"""The trace that a request belongs to, as W3C's Trace Context writes it in one line of text."""

from __future__ import annotations

import re
from typing import Annotated, TypeGuard

from msgspec import Meta

# https://www.w3.org/TR/trace-context: ids of zeros, and version ff, are invalid. A higher version
# is read as 00 is; what it may have behind the flags does not travel.
PATTERN = r"\A(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}\Z"
SIZE = 55
EXAMPLE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

Traceparent = Annotated[str, Meta(min_length=SIZE, max_length=SIZE, pattern=PATTERN)]
"""Version, id of the trace, id of the span that is the parent, flags (1: it is recorded)."""
_matches = re.compile(PATTERN).match


def is_traceparent(value: object) -> TypeGuard[str]:
    """Whether it is one. W3C: a receiver ignores anything else."""
    return isinstance(value, str) and _matches(value) is not None


def checked_traceparent(value: str | None) -> str | None:
    """A caller's; raises ValueError for what is none."""
    if value is None or is_traceparent(value):
        return value
    raise ValueError(f"traceparent={value!r}: as W3C writes it, such as {EXAMPLE}; or None.")


def trace_of(traceparent: str) -> str:
    """The trace's id."""
    return traceparent[3:35]


def parent_of(traceparent: str) -> str:
    """The id of the parent span."""
    return traceparent[36:52]


def flags_of(traceparent: str) -> int:
    """Its flags."""
    return int(traceparent[53:], 16)
