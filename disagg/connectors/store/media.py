"""What pictures and other media in a prompt are: digests of all that an engine's encoder is given.
An engine's own hash of a picture is made to be compared within that engine.
"""

from __future__ import annotations

import hashlib
import struct
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from disagg.log import log
from disagg.store.workers import Workers
from kvpool.prefix.chain import KEY_BYTES, Media, MediaSpan


@dataclass(frozen=True, slots=True)
class Medium:
    """`data`, as an engine has it, stands at `positions` of a prompt; `name` is what else is known
    of it.
    """

    positions: range
    name: tuple[Any, ...]
    data: Any


class MediaDigests:
    """Computes digests in a thread, of each object once while it lives: an engine that keeps a
    picture for the turns of a conversation gives the same object again. `values` are those of an
    engine's object.
    """

    def __init__(self, values: Callable[[Any], Any]) -> None:
        self._values = values
        self._known: dict[int, tuple[weakref.ref[Any], bytes]] = {}
        self._workers: Workers | None = None

    def spans(self, media: Sequence[Medium], most: int) -> Future[tuple[Media, int]]:
        """What keys say of `media`, in order, and how many tokens of the prompt they say all of:
        at most `most`, and none from the first of them on that has no digest.
        """
        future: Future[tuple[Media, int]] = Future()
        if self._workers is None:
            self._workers = Workers(1, "kvpool media")
        self._workers.do(lambda: future.set_result(self._spans(media, most)))
        return future

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close(1.0)

    def _spans(self, media: Sequence[Medium], most: int) -> tuple[Media, int]:
        spans: list[MediaSpan] = []
        for medium in media:
            try:
                digest = media_digest([*medium.name, self._data_digest(medium.data)])
                spans.append(MediaSpan(medium.positions, digest))
            except Exception as error:  # an engine's object may be anything
                log.warning("store: state behind a medium is not kept: %s", error)
                return spans, min(most, medium.positions.start)
        return spans, most

    def _data_digest(self, data: Any) -> bytes:
        number = id(data)
        if number in self._known:
            reference, digest = self._known[number]
            if reference() is data:
                return digest
        digest = media_digest(self._values(data))
        with suppress(TypeError):  # some objects cannot be referred to
            reference = weakref.ref(data, lambda _: self._known.pop(number, None))
            self._known[number] = reference, digest
        return digest


def media_digest(value: Any) -> bytes:
    """Of tensors, arrays, numbers and text, in lists and mappings: no two values have one digest.
    Raises TypeError for anything else.
    """
    total = hashlib.blake2b(digest_size=KEY_BYTES, person=b"medium")
    _update(total, value)
    return total.digest()


def _update(total: Any, value: Any) -> None:
    match value:
        case torch.Tensor():
            _say(total, b"h", f"{value.dtype} {tuple(value.shape)}".encode())
            entries = value.detach().cpu().contiguous().reshape(-1)
            _say(total, b"e", entries.view(torch.uint8).numpy())
        case np.ndarray() if not value.dtype.hasobject:
            _say(total, b"h", f"{value.dtype.str} {value.shape}".encode())
            _say(total, b"e", np.ascontiguousarray(value).reshape(-1).view(np.uint8))
        case bytes():
            _say(total, b"b", value)
        case str():
            _say(total, b"t", value.encode(errors="surrogatepass"))
        case None | bool() | int() | float():
            _say(total, b"s", f"{type(value).__name__} {value!r}".encode())
        case Mapping():
            total.update(struct.pack("<cq", b"m", len(value)))
            for name in sorted(value):
                _update(total, name)
                _update(total, value[name])
        case list() | tuple():
            total.update(struct.pack("<cq", b"l", len(value)))
            for item in value:
                _update(total, item)
        case _:
            raise TypeError(f"{type(value).__name__} has no digest.")


def _say(total: Any, kind: bytes, data: Any) -> None:
    """Begins with its kind and its length, so that no two values are written alike."""
    total.update(struct.pack("<cq", kind, memoryview(data).nbytes))
    total.update(data)
