"""From what was observed of a pair to what is written of it. No engine, no clock, no file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Answers = tuple[tuple[int, ...], ...]
"""Tokens, of a prompt each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One run of a pair, and of its single engines. What was not reached is None.

    here: why the pair cannot run here: a package that is not installed.
    refused: the connector's reason, at start, at the handshake or as the request's failure.
    lost: an engine that ended: its name and its last lines.
    tokens: of prefill and decode together.
    alone_prefill, alone_decode: of a single engine with the ranks and dtype of that side.
    differences: the first byte that differs, with its place and both values; "" if all are equal.
    errors: requests that failed though others were served.
    """

    here: str | None = None
    refused: str | None = None
    lost: str | None = None
    tokens: Answers | None = None
    alone_prefill: Answers | None = None
    alone_decode: Answers | None = None
    differences: str | None = None
    errors: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
