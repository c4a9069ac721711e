"""What a user of a serving engine may set, checked."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from disagg.engines.base import Engine, create_engine, engine_class
from disagg.engines.options import check_engine_options
from disagg.protocol.messages import Convention, checked_conventions
from disagg.runtime.options import STEPPED_PEER_TIMEOUT, Options, check_values
from disagg.runtime.sockets.listen_address import ListenAddress
from disagg.runtime.sockets.tls import TLSFiles
from kvpool.layout.text import nearest
from kvpool.layout.units import parse_memory


@dataclass(frozen=True)
class Settings:
    """The same names for every engine. Raises ValueError that names what is wrong."""

    engine: str = "local"
    """What moves bytes: local, nixl, mooncake, or another of `disagg.engines`."""
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    """What the engine takes by name (docs/engines.md): {"protocol": "rdma"} of Mooncake."""
    bind: str | None = None
    """Where its ranks listen (docs/addresses.md): None is a new unix socket each; `tcp://HOST:*`
    serves other hosts, `tcp://HOST:29100+rank` at ports that are known before.
    """
    advertise: str | None = None
    """What decodes dial, if it is not where a rank listens: `tcp://HOST:*`, `tcp://HOST:31000+rank`.
    """
    keys: str | None = None
    """A folder of `kvpool keys`."""
    tls: TLSFiles | None = None
    """In place of keys, paths of an organisation's own files: `ca`, `certificate` and `key`."""
    insecure: bool = False
    """TCP without keys: messages can be read, and any process may connect."""
    lease: float | None = 300.0
    """Seconds for which blocks wait for a decode engine."""
    offer_timeout: float | None = 60.0
    """Seconds for which a request waits in which nothing happens."""
    peer_timeout: float | None = None
    """Seconds: an engine that is silent for longer is dead."""
    drain_seconds: float = 3.0
    """At the end of an engine: seconds in which other engines may still read what it has sent."""
    verify: Literal["checksum"] | None = None
    """"checksum": digests of both sides are compared before a request goes on."""
    stream: Literal["chunks", "layers"] | None = None
    """A prompt is offered while it is computed, chunk by chunk or each layer of a chunk. A decode
    engine with "layers" waits for each layer in its forward pass.
    """
    allow_missing: Collection[str] = ()
    """What prefill may lack, by owner or role: ["draft"] where only decode speculates. Decode's
    memory for it stays as it is, so that the acceptance of drafts begins low.
    """
    cast: bool | Collection[str] = False
    """Whether decode converts what prefill has in another format, or the roles to convert: true,
    ["k", "v"] (docs/cast.md).
    """
    convert_to: str | None = None
    """A type of floats ("float8_e4m3fn") in which prefill hands over what it has computed in
    another, where decode does and the wire is narrow (docs/cast.md).
    """
    convert_room: int | str = "1GiB"
    """Bytes of a rank for what is converted and not yet read."""
    shared_memory: bool = True
    """KV memory of the CPU is made so that engine `local` of another process can map it."""
    conventions: Mapping[str, Convention | None] = field(default_factory=dict)
    """Instead of what the engine knows of its model; null: not compared (docs/connectors.md)."""
    contract: str | None = None
    """HOST:PORT where the engine serves its contract to any client (docs/contract.md)."""
    store: str | None = None
    """The URL of a store of state (docs/store.md)."""
    chunk_tokens: int = 256
    """Tokens of its chunks: the same for all engines that share it."""
    store_timeout: float = 10.0
    """Seconds after which what the store has not given is computed."""
    store_room: int | str | None = None
    """Bytes that may wait in a rank's memory until they are written, also as text: "4GiB". None: a
    part of the host's memory (`Store`).
    """

    def __post_init__(self) -> None:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        if self.peer_timeout is None:  # the endpoints' own
            del values["peer_timeout"]
        check_values(**values)
        if self.engine_options:
            check_engine_options(self.engine, engine_class(self.engine), self.engine_options)
        document: Any = self.conventions
        if isinstance(document, Mapping):  # what is not compared has a name too
            document = {name: 0 if v is None else v for name, v in document.items()}
        checked_conventions(document)

    @classmethod
    def read(cls, values: Mapping[str, Any], source: str) -> Settings:
        """The settings that a user has given the engine in its option `source`."""
        names = sorted(f.name for f in fields(cls))
        if unknown := [name for name in values if name not in names]:
            raise ValueError(
                f"{source}: {unknown[0]!r} is not known; there are {', '.join(names)}."
                f"{nearest(str(unknown[0]), names)}"
            )
        try:
            return cls(**values)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None

    @classmethod
    def of_environment(cls, variable: str, unused: Collection[str], **defaults: Any) -> Settings:
        """From JSON in an environment variable, for an engine that leaves settings `unused`."""
        try:
            values = json.loads(os.environ.get(variable) or "{}")
        except ValueError as error:
            raise ValueError(f"{variable}: no JSON: {error}.") from None
        if not isinstance(values, dict):
            raise ValueError(f'{variable}: a JSON object, such as {{"engine": "nixl"}}.')
        if wrong := sorted({*unused} & set(values)):
            raise ValueError(f"{variable}: {', '.join(wrong)} is not for this engine.")
        return cls.read(defaults | values, variable)

    def new_engine(self) -> Engine:
        """An engine for an endpoint. Raises EngineUnavailable or ValueError."""
        return create_engine(self.engine, **self.engine_options)

    def addresses(self, rank: int) -> dict[str, str | None]:
        """`bind` and `advertise` of a rank by its number in the engine. Raises ValueError."""
        return {
            name: None if text is None else str(ListenAddress.parse(text).of_rank(rank))
            for name, text in (("bind", self.bind), ("advertise", self.advertise))
        }

    @property
    def room(self) -> int | None:
        """`store_room` in bytes."""
        return None if self.store_room is None else self.bytes_of("store_room")

    def bytes_of(self, name: str) -> int:
        """A setting that is a number of bytes, or a text that says one."""
        size = getattr(self, name)
        return parse_memory(size) if isinstance(size, str) else int(size)

    def options(self, conventions: Mapping[str, Convention]) -> Options:
        """What both endpoints take. These settings come before `conventions`, the engine's."""
        document = {**conventions, **self.conventions}
        return {
            "keys": self.keys,
            "tls": self.tls,
            "insecure": self.insecure,
            # an engine can hold the GIL for long: while it compiles, or captures graphs
            "peer_timeout": self.peer_timeout or STEPPED_PEER_TIMEOUT,
            "conventions": {name: v for name, v in document.items() if v is not None},
        }
