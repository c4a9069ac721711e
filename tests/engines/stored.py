"""One side writes prompts to a store, and others go on with them. A side is an engine, or a
`PoolCache`, with an oracle that saves what its own tensors hold of the last chunk of each prompt:
as `prefill` of what it has computed, as `decode` of what it has read.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from disagg.store.lookup import REFRESH_SECONDS
from kvpool.prefix.chain import PrefixKey
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

    def ask(self, prompts: Prompts, tokens: int = 24, tenant: str = "") -> list[Answer]:
        """What it answers to a tenant, with what the store has of the prompts."""

    def recompute(self, prompts: Prompts, tokens: int = 24) -> list[Answer]:
        """What it answers without the store."""

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Written:
    """Prompts that a side has computed and stored for a tenant."""

    side: Side
    prompts: Prompts
    answers: list[Answer]
    tenant: str
    when: float
    """At which they were stored, of the monotonic clock."""


def recompute(side: Side, prompts: Prompts, tokens: int = 24) -> list[Answer]:
    """Raises EngineFailed if the side has not computed all of them."""
    return _computed(side, prompts, side.recompute(prompts, tokens), tokens)


def write(side: Side, url: str, prompts: Prompts, *, tokens: int = 24, tenant: str = "") -> Written:
    """Raises EngineFailed if the side has not computed all of them, or they are not stored."""
    answers = _computed(side, prompts, side.ask(prompts, tokens, tenant), tokens)
    until_stored(url, prompts, tenant)
    _until_saved(side, "prefill", [chunk_keys(prompt, tenant) for prompt in prompts])
    when = time.monotonic()
    return Written(side=side, prompts=prompts, answers=answers, tenant=tenant, when=when)


def _computed(side: Side, prompts: Prompts, answers: list[Answer], tokens: int) -> list[Answer]:
    for prompt, answer in zip(prompts, answers):
        asked = f"{side.name}, asked for a prompt of {len(prompt)} tokens that nothing has written,"
        if answer.cached:
            raise EngineFailed(f"{asked} counts {answer.cached} tokens as cached.")
        if len(answer.tokens) != tokens:
            raise EngineFailed(f"{asked} answers {answer.tokens}, not {tokens} tokens.")
    return answers


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What came of prompts that a side has read: tokens that it has counted as cached, tensors and
    bytes that were compared, how many tensors are `different`, how many answers are right, and what
    is wrong, as sentences.
    """

    cached: list[int]
    tensors: int
    nbytes: int
    different: int
    right: int
    faults: list[str]


def read(
    written: Written,
    side: Side,
    recomputed: list[Answer],
    folder: Path,
    *,
    first: int | None = None,
) -> Reading:
    """A side answers prompts that another has written. Its tokens must be those that it has
    `recomputed`, and the writer's: all, or the `first`. `folder` is a new one, for what both hold
    of the prompts.
    """
    prompts, count = written.prompts, len(recomputed[0].tokens)
    # so often engines look for geometries of others
    time.sleep(max(0.0, written.when + REFRESH_SECONDS - time.monotonic()))
    answers = side.ask(prompts, count, written.tenant)
    tensors, nbytes, different = _compare(written, side, answers, folder)
    faults, wrong = list[str](), set[int]()
    for number, (prompt, answer) in enumerate(zip(prompts, answers)):
        asked = f"of a prompt of {len(prompt)} tokens"
        if answer.cached != (right := whole_chunks(len(prompt))):
            faults.append(f"{asked} {answer.cached} are cached, not {right}.")
        for whose, others in ("without the store", recomputed), ("the writer's", written.answers):
            tokens, other = answer.tokens[:first], others[number].tokens[:first]
            if tokens != other:
                wrong.add(number)
                faults.append(f"{asked} the answer is {tokens}, {whose} {other}.")
    if different:
        faults.append(f"{len(different)} of {tensors} tensors differ: {'; '.join(different[:3])}.")
    if not tensors:
        faults.append("no byte was compared.")
    return Reading(
        cached=[answer.cached for answer in answers],
        tensors=tensors,
        nbytes=nbytes,
        different=len(different),
        right=len(prompts) - len(wrong),
        faults=[f"{side.name} reads what {written.side.name} has written: {f}" for f in faults],
    )


def _compare(
    written: Written, side: Side, answers: list[Answer], folder: Path
) -> tuple[int, int, list[str]]:
    """Of prompts that were read, the writer's files and the reader's."""
    folder.mkdir(parents=True)
    keys = [
        chunk_keys(prompt, written.tenant)
        for prompt, answer in zip(written.prompts, answers)
        if answer.cached
    ]
    for path in _until_saved(side, "decode", keys) + _until_saved(written.side, "prefill", keys):
        os.link(path, folder / path.name)
    return compare(folder)


def _until_saved(
    side: Side, what: str, prompts: list[list[PrefixKey]], seconds: float = 30.0
) -> list[Path]:
    """Files of prompts' last chunks, of all ranks, once the oracles have saved them."""
    until = time.monotonic() + seconds
    paths = [
        side.watch / f"{what}.{keys[-1].hex()}.{rank}.pt"
        for keys in prompts
        if keys
        for rank in range(side.ranks)
    ]
    while missing := [path.name for path in paths if not path.exists()]:
        if time.monotonic() > until:
            raise EngineFailed(f"{side.name}: its oracle has not saved {missing}.")
        time.sleep(0.02)
    return paths
