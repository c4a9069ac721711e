"""What a store needs of a place for objects."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Protocol

Buffer = Any


class FloorError(OSError):
    """The floor does not answer, or refuses."""


class NotThere(FloorError):
    """No object has that name."""


class Floor(Protocol):
    def create(self, name: str, parts: Sequence[Buffer]) -> bool: ...
    def put(self, name: str, parts: Sequence[Buffer]) -> None: ...
    def read(
        self, name: str, ranges: Sequence[tuple[int, int]]
    ) -> AbstractContextManager[Sequence[Buffer]]: ...
    def exists(self, names: Sequence[str]) -> list[bool]: ...
    def list(self, prefix: str) -> Iterator[Any]: ...
    def delete(self, names: Sequence[str]) -> None: ...
    def close(self) -> None: ...


class Memory:
    objects: ClassVar[dict[str, dict[str, bytes]]] = {}

    def __init__(self, url: str) -> None:
        self.held = self.objects.setdefault(url, {})
        self.lock = threading.Lock()
        self.fetched = 0

    def create(self, name: str, parts: Sequence[Buffer]) -> bool:
        with self.lock:
            if name in self.held:
                return False
            self.held[name] = b"".join(bytes(p) for p in parts)
            return True

    def put(self, name: str, parts: Sequence[Buffer]) -> None:
        self.held[name] = b"".join(bytes(p) for p in parts)

    def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> Any:
        if name not in self.held:
            raise NotThere(name)
        data = self.held[name]
        if any(stop > len(data) for _, stop in ranges):
            raise FloorError(f"{name}: short")
        return nullcontext([memoryview(data)[a:b] for a, b in ranges])

    def exists(self, names: Sequence[str]) -> list[bool]:
        return [n in self.held for n in names]

    def list(self, prefix: str) -> Iterator[Any]:
        yield from ((n, len(d)) for n, d in sorted(self.held.items()) if n.startswith(prefix))

    def delete(self, names: Sequence[str]) -> None:
        for n in names:
            self.held.pop(n, None)

    def close(self) -> None: ...


def open_floor(url: str) -> Floor:
    return Memory(url)
