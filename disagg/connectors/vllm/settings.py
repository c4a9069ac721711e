"""`kv_connector_extra_config`, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from disagg.runtime.options import Options

STREAMS = (None, "chunks")


@dataclass(frozen=True)
class Settings:
    """What `--kv-transfer-config '{"kv_connector_extra_config": {...}}'` takes.

    Raises ValueError that names what is wrong.
    """

    engine: str = "local"
    """What moves bytes: local, nixl, mooncake, or another of `disagg.engines`."""
    bind: str | None = None
    """Where this engine's ranks listen for decode engines: None is a new unix socket a rank;
    `tcp://HOST:*` with keys serves other hosts.
    """
    keys: str | None = None
    """A folder of `kvpool keys`."""
    insecure: bool = False
    """Without keys, messages may leave this host all the same."""
    lease: float | None = 300.0
    """Seconds for which blocks wait for a decode engine."""
    offer_timeout: float | None = 60.0
    """Seconds for which a request waits in which nothing happens."""
    peer_timeout: float | None = None
    """Seconds: an engine that is silent for longer is dead."""
    verify: Literal["checksum"] | None = None
    """"checksum": digests of both sides are compared before a request goes on."""
    stream: Literal["chunks"] | None = None
    """"chunks": a prompt is offered while it is computed."""
    shared_memory: bool = True
    """KV memory of the CPU is made so that engine `local` of another process can map it."""
    options: Options = field(default_factory=Options, repr=False)

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Settings:
        """The settings of vLLM's extra config."""
        known = {f.name for f in fields(cls)} - {"options"}
        unknown = sorted(set(given) - known)
        if unknown:
            raise ValueError(
                f"kv_connector_extra_config: {', '.join(unknown)} is not known; there are "
                f"{', '.join(sorted(known))}."
            )
        settings = cls(**given)
        if settings.stream not in STREAMS:
            raise ValueError(f"stream={settings.stream!r}: 'chunks', or nothing.")
        options = settings.options
        options["threaded"] = False
        if settings.keys is not None:
            options["keys"] = settings.keys
        if settings.insecure:
            options["insecure"] = True
        if settings.peer_timeout is not None:
            options["peer_timeout"] = settings.peer_timeout
        return settings
