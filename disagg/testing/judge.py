"""From what was observed of a pair to what is written of it. No engine, no clock, no file."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Tokens = tuple[int, ...]
Answers = tuple[Tokens, ...]
"""Of a prompt each; of a request that failed `()`."""


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


Result = Literal[
    "serves", "refuses", "WRONG", "unsteady", "lost", "fails", "cannot be judged", "not here"
]
WRONG_RUNS = 3
"""Runs with a wrong answer before a row is WRONG: the first, and two that reproduce it."""
TRIED_TWICE = "refuses", "lost", "fails"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is written of a row."""

    result: Result
    reason: str
    runs: int = 1

    def words(self) -> str:
        return f"{self.result} ({self.reason})" if self.reason else self.result


def judge(runs: Sequence[Observation]) -> Verdict | None:
    """What is written after these runs of a pair; None if that needs another run.

    A pair that refuses, fails or loses an engine is tried twice. A wrong answer is tried until it
    has been seen WRONG_RUNS times in succession; one that is not reproduced leaves a row unsteady.
    """
    verdicts = [judge_run(run) for run in runs]
    results = [verdict.result for verdict in verdicts]
    if not results:
        return None
    if "WRONG" in results:
        first = results.index("WRONG")
        if len(results) < first + WRONG_RUNS:
            return None
        times = results.count("WRONG")
        if times < WRONG_RUNS:
            reason = f"WRONG in {times} of {len(runs)} runs: {verdicts[first].reason}"
            return Verdict(result="unsteady", reason=reason, runs=len(runs))
        return replace(verdicts[first], runs=len(runs))
    if results[0] not in TRIED_TWICE:
        return verdicts[0]
    if len(results) == 1:
        return None
    if results[0] == results[1]:
        return replace(verdicts[0], runs=2)
    if results == ["refuses", "serves"]:
        reason = f"{verdicts[1].reason}; the first run refused: {verdicts[0].reason}"
        return Verdict(result="serves", reason=reason, runs=2)
    reason = "; then ".join(verdict.words() for verdict in verdicts)
    return Verdict(result="unsteady", reason=reason, runs=2)


def judge_run(run: Observation) -> Verdict:
    """What one run shows. A wrong answer counts before a loss, a refusal or an error."""
    wrong, doubt = _token_difference(run)
    if run.differences:
        tokens = f"; {wrong}" if wrong else "" if doubt else "; tokens are right"
        return Verdict(result="WRONG", reason=run.differences + tokens)
    if wrong and run.differences is None:
        return Verdict(result="WRONG", reason=wrong)
    if run.lost is not None:
        return Verdict(result="lost", reason=run.lost)
    if run.refused is not None:
        return Verdict(result="refuses", reason=run.refused)
    if run.errors:
        return Verdict(result="fails", reason=run.errors[0])
    if run.here is not None:
        return Verdict(result="not here", reason=run.here)
    if run.differences == "":
        return Verdict(result="serves", reason=f"bytes, but {wrong}" if wrong else "bytes")
    if doubt:
        return Verdict(result="cannot be judged", reason=doubt)
    return Verdict(result="serves", reason="tokens")


def _token_difference(run: Observation) -> tuple[str, str]:
    """The first token that both single engines have otherwise, and why tokens cannot tell; each
    empty if there is none. Where the single engines differ, either may be right and so may a third.
    """
    wrong = doubt = ""
    if run.tokens is None or run.alone_prefill is None or run.alone_decode is None:
        return wrong, "there are neither bytes nor tokens to compare"
    failed = bool(run.errors or run.lost or run.refused)
    answers = zip(run.tokens, run.alone_prefill, run.alone_decode, strict=True)
    for number, (tokens, prefill, decode) in enumerate(answers, 1):
        if prefill != decode:
            token, left, right = _first_difference(prefill, decode)
            place = f"prompt {number}, token {token}: {left} and {right}"
            doubt = doubt or f"the single engines differ from each other at {place}"
        elif tokens != prefill and (tokens or not failed):
            token, left, right = _first_difference(tokens, prefill)
            place = f"prompt {number}, token {token}"
            wrong = wrong or f"{place} is {left}, {right} of both single engines"
    return wrong, doubt


def _first_difference(first: Tokens, second: Tokens) -> tuple[int, int | str, int | str]:
    """The number of the first token that differs, and both; `none` where an answer has ended."""
    pairs = enumerate(itertools.zip_longest(first, second, fillvalue="none"), 1)
    return next((number, left, right) for number, (left, right) in pairs if left != right)
