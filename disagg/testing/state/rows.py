"""What both sides of a pair have saved of their state, compared byte for byte.

A rank's file has arrays `[position, head, byte]` by part (owner, layer, role), and `told`: JSON of
how many tokens they are of, where each part begins, and how ranks share it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPart:
    """One role of one layer, all heads of all ranks: `[position, head, byte]` from `start` on.
    `copies`: what other ranks hold of it where each holds the same.
    """

    owner: str
    start: int
    dtype: str
    array: Array
    copies: tuple[Array, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """What one side holds of a request: `tokens` positions."""

    tokens: int
    parts: Mapping[str, SavedPart]
    unread: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateComparison:
    """Of one request. `received`: decode had state when it began. `parts` of it were compared,
    `unread` could not be; `difference` is empty where all that was compared is equal.
    """

    received: bool
    parts: int = 0
    unread: tuple[str, ...] = ()
    difference: str = ""


def compare(folder: Path, request: str) -> StateComparison:
    """Decode's state of a request with prefill's."""
    decode = {kind: _states(folder, "decode", request, kind) for kind in ("rows", "states")}
    prefill = {kind: _states(folder, "prefill", request, kind) for kind in ("rows", "states")}
    received = {kind: max(states) for kind, states in decode.items() if states}
    if not received:
        return StateComparison(received=False)
    unread: list[str] = []
    count, differences = 0, []
    for kind, tokens in received.items():
        ours = decode[kind][tokens]
        # recurrent state is that after a number of tokens, rows are those of each token before
        number = max(prefill[kind], default=0) if kind == "rows" else tokens
        theirs = prefill[kind].get(number)
        if theirs is None:
            counts = ", ".join(map(str, sorted(prefill[kind]))) or "none"
            told = f"decode holds recurrent state of {tokens} tokens, prefill computed it after "
            differences.append(told + f"{counts}" if kind == "states" else "prefill saved no rows")
            continue
        unread += [*ours.unread, *theirs.unread]
        count += len(ours.parts)
        differences += _differences(ours, theirs)
    text = ""
    if differences:
        text = differences[0]
        text += f"; {len(differences)} of {count} parts differ" if count > 1 else ""
    return StateComparison(
        received=True, parts=count, unread=tuple(dict.fromkeys(unread)), difference=text
    )


def _states(folder: Path, side: str, request: str, kind: str) -> dict[int, SavedState]:
    """By the number of tokens, what the ranks of a side hold together."""
    ranks: dict[int, list[tuple[Any, dict[str, Array]]]] = {}
    files = folder.glob(f"{side}.{request}.*.{kind}.npz")
    for file in sorted(files, key=lambda path: [*map(int, path.name.split(".")[2:4])]):
        with np.load(file) as arrays:
            told = json.loads(arrays["told"].tobytes())
            parts = {key: arrays[key] for key in told["parts"]}
        ranks.setdefault(told["tokens"], []).append((told, parts))
    return {tokens: _joined(tokens, saved) for tokens, saved in ranks.items()}


def _joined(tokens: int, ranks: list[tuple[Any, dict[str, Array]]]) -> SavedState:
    parts: dict[str, SavedPart] = {}
    for key in dict.fromkeys(key for _, arrays in ranks for key in arrays):
        facts = next(told["parts"][key] for told, arrays in ranks if key in arrays)
        arrays = [arrays[key] for _, arrays in ranks if key in arrays]
        shared = facts["join"] == "same"
        parts[key] = SavedPart(
            owner=facts["owner"],
            start=facts["start"],
            dtype=facts["dtype"],
            array=arrays[0] if shared else np.concatenate(arrays, 1),
            copies=tuple(arrays[1:]) if shared else (),
        )
    unread = tuple(part for told, _ in ranks for part in told["unread"])
    return SavedState(tokens=tokens, parts=parts, unread=unread)


def _differences(ours: SavedState, theirs: SavedState) -> list[str]:
    """A sentence for each part of decode's that is not prefill's."""
    owners = {part.owner for part in theirs.parts.values()}
    sentences = []
    for key, part in ours.parts.items():
        if part.owner not in owners:
            continue  # a draft that prefill lacks: decode's begins from nothing
        prefill = theirs.parts.get(key)
        if prefill is None:
            sentences.append(f"{key}: prefill has no such part")
        elif part.dtype != prefill.dtype:
            sentences.append(f"{key}: {prefill.dtype} on prefill, {part.dtype} on decode")
        elif text := _difference(part, prefill):
            sentences.append(f"{key}, {text}")
    return sentences


def _difference(part: SavedPart, prefill: SavedPart) -> str:
    start = max(part.start, prefill.start)
    stop = part.start + len(part.array)
    if prefill.start > part.start + 1 or prefill.start + len(prefill.array) < stop:
        end = prefill.start + len(prefill.array)
        return f"decode has tokens {part.start} to {stop}, prefill {prefill.start} to {end}"
    theirs = prefill.array[start - prefill.start : stop - prefill.start]
    for array in (part.array, *part.copies):
        mine, right = _same_heads(array[start - part.start :], theirs)
        if mine.shape != right.shape:
            return f"heads and bytes {right.shape[1:]} on prefill, {mine.shape[1:]} on decode"
        if len(places := np.argwhere(mine != right)):
            token, head, byte = map(int, places[0])
            values = [_value(rows[token, head], byte, part.dtype) for rows in (right, mine)]
            place = f"token {start + token}, head {head}, byte {byte}"
            return f"{place}: {values[0]} on prefill, {values[1]} on decode"
    return ""


def _same_heads(first: Array, second: Array) -> tuple[Array, Array]:
    """Where there are more ranks than heads, several ranks hold a head."""
    few, many = sorted((first.shape[1], second.shape[1]))
    if few and few != many and many % few == 0:
        times = many // few
        wide = [
            np.repeat(array, times, 1) if array.shape[1] == few else array
            for array in (first, second)
        ]
        return wide[0], wide[1]
    return first, second


def _value(row: Array, byte: int, dtype: str) -> str:
    """The element that a byte belongs to."""
    size = {"float32": 4, "bfloat16": 2, "float16": 2}.get(dtype, 1)
    element = row[byte - byte % size :][:size].copy()
    if dtype == "bfloat16":
        return f"{float((element.view(np.uint16).astype(np.uint32) << 16).view(np.float32)[0]):g}"
    if size > 1:
        return f"{float(element.view(dtype)[0]):g}"
    return f"0x{int(element[0]):02x}"
