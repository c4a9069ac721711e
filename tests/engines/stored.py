"""One side writes prompts to a store, and others go on with them. A side is an engine, or a
`PoolCache`, with an oracle that saves what its own tensors hold of the last chunk of each prompt:
as `prefill` of what it has computed, as `decode` of what it has read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests.engines.chunks import chunk_keys, until_stored, whole_chunks
from tests.engines.pair import compare
from tests.engines.process import EngineFailed

Prompts = list[list[int]]


@dataclass(frozen=True)
class Answer:
    """Tokens, and how many of its prompt a side has counted as not computed."""

    tokens: list[int]
    cached: int


class Side(Protocol):
    """`watch` is its oracle's folder, with a file for each of `ranks`."""

    name: str
    ranks: int
    watch: Path

    def ask(self, prompts: Prompts, tokens: int = 24) -> list[Answer]:
        """What it answers, with what the store has of the prompts."""

    def recompute(self, prompts: Prompts, tokens: int = 24) -> list[Answer]:
        """What it answers without that."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Written:
    """Prompts that a side has computed and stored, and its answers."""

    side: Side
    prompts: Prompts
    answers: list[Answer]


def write(side: Side, url: str, prompts: Prompts, tokens: int = 24) -> Written:
    """Raises EngineFailed if the side has not computed all of them, or they are not stored."""
    answers = side.ask(prompts, tokens)
    for prompt, answer in zip(prompts, answers):
        if answer.cached:
            raise EngineFailed(
                f"{side.name} counts {answer.cached} tokens of a prompt of {len(prompt)} as "
                "cached, which nothing has written."
            )
        if len(answer.tokens) != tokens:
            raise EngineFailed(
                f"{side.name} answers {answer.tokens} to a prompt of {len(prompt)} tokens, not "
                f"{tokens} tokens."
            )
    until_stored(url, prompts)
    _until_saved(side, prompts)
    return Written(side, prompts, answers)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What came of prompts that a side has read: tokens that it has counted as cached, tensors and
    bytes that were compared, how many prompts have the right tokens, and what is wrong, as
    sentences.
    """

    cached: list[int]
    tensors: int
    nbytes: int
    equal: int
    different: int
    """Tensors that differ."""
    faults: list[str]


def read(written: Written, side: Side, folder: Path, *, exact: bool = True) -> Reading:
    """A side answers prompts that another has written. `folder` is a new one, for what both hold of
    them. Tokens must be those that it computes by itself; where both compute the same to the last
    bit (`exact`), also the writer's.
    """
    prompts, count = written.prompts, len(written.answers[0].tokens)
    answers, recomputed = side.ask(prompts, count), side.recompute(prompts, count)
    folder.mkdir(parents=True)
    for path in written.side.watch.glob("prefill.*.pt"):
        os.link(path, folder / path.name)
    for path in side.watch.glob("decode.*.pt"):
        path.rename(folder / path.name)
    tensors, nbytes, different = compare(folder)
    wrong_tokens = [
        *_other_tokens(prompts, answers, recomputed, "computed by itself"),
        *(_other_tokens(prompts, answers, written.answers, "of the writer") if exact else ()),
    ]
    faults = [*_miscounted(prompts, answers, recomputed), *(text for _, text in wrong_tokens)]
    if different:
        faults.append(f"{len(different)} of {tensors} tensors differ: {'; '.join(different[:3])}.")
    if not tensors:
        faults.append("nothing was compared.")
    return Reading(
        cached=[answer.cached for answer in answers],
        tensors=tensors,
        nbytes=nbytes,
        equal=len(prompts) - len({number for number, _ in wrong_tokens}),
        different=len(different),
        faults=[f"{side.name} reads what {written.side.name} has written: {f}" for f in faults],
    )


def _other_tokens(
    prompts: Prompts, answers: list[Answer], others: list[Answer], whose: str
) -> Iterator[tuple[int, str]]:
    for number, (prompt, answer, other) in enumerate(zip(prompts, answers, others)):
        if answer.tokens != other.tokens:
            yield (
                number,
                f"after a prompt of {len(prompt)} tokens come {answer.tokens}, {whose} "
                f"{other.tokens}.",
            )


def _miscounted(prompts: Prompts, answers: list[Answer], recomputed: list[Answer]) -> Iterator[str]:
    for prompt, answer, alone in zip(prompts, answers, recomputed):
        if answer.cached != (right := whole_chunks(len(prompt))):
            yield f"of a prompt of {len(prompt)} tokens {answer.cached} are cached, not {right}."
        if alone.cached:
            yield f"of a prompt of {len(prompt)} tokens to be computed {alone.cached} are cached."


def _until_saved(side: Side, prompts: Prompts, seconds: float = 30.0) -> None:
    """Waits until the oracles of all its ranks have saved what was written."""
    until = time.monotonic() + seconds
    paths = [
        side.watch / f"prefill.{keys[-1].hex()}.{rank}.pt"
        for keys in map(chunk_keys, prompts)
        if keys
        for rank in range(side.ranks)
    ]
    while not all(path.exists() for path in paths):
        if time.monotonic() > until:
            raise EngineFailed(f"{side.name}: its oracle has saved nothing after {seconds:.0f} s.")
        time.sleep(0.02)
