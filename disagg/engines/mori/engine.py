"""Reads through AMD's MoRI-IO over RDMA.

Written from MoRI's sources and the calls that SGLang and vLLM make of it; not yet run
(docs/engines.md).
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import msgspec

from disagg.engines.base import EngineUnavailable, TransferError, decode_metadata
from disagg.engines.mori.reader import TOKEN_BYTES, MoriIO, MoriReader, mori_io
from disagg.engines.ranges import MAX_REGIONS, Ranges
from disagg.engines.threaded import ThreadedEngine, ThreadedPeer
from kvpool.extras import absent, install
from kvpool.layout import Slab
from kvpool.layout.types import HOST

NO_XGMI = "MORI_DISABLE_AUTO_XGMI"


class MoriMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a peer needs to read from this side: MoRI's packed `EngineDesc` and `MemoryDesc`s. The
    registration `token_memory` begins with `token`.
    """

    engine: bytes
    token: bytes
    token_memory: bytes
    memory: Annotated[list[bytes], msgspec.Meta(max_length=MAX_REGIONS)]


class MoriEngine(ThreadedEngine):
    """Memory of the host and of AMD GPUs over RDMA. Peers reach this host as `hostname`, an IPv4
    address. Each peer is read through its own `IOEngine`.
    """

    name = "mori"
    # of `max_bytes`: MoRI joins runs, and refuses more than the longest message of the NIC
    max_runs = 4096  # four parts fit the send queues; for more MoRI would wait

    def __init__(self, hostname: str = "127.0.0.1") -> None:
        reason = self.availability()
        if reason is not None:
            raise EngineUnavailable(f"engine mori: {reason}")
        _check_host(hostname)
        if os.environ.setdefault(NO_XGMI, "1")[:1] in ("", "0"):
            raise EngineUnavailable(
                f"{NO_XGMI}={os.environ[NO_XGMI]}: MoRI could move bytes over XGMI, and engine "
                "mori knows only how its RDMA reads end. Unset the variable."
            )
        super().__init__(hostname)
        self._slabs: list[Slab] = []
        self._serving: MoriIO | None = None

    @classmethod
    def availability(cls) -> str | None:
        """All that is missing, found without importing MoRI; if nothing is, it must load."""
        reason = absent(
            {
                "an AMD GPU with its driver (/dev/kfd)": _driver(),
                "a NIC with an active RDMA port (/sys/class/infiniband)": _active_port(),
                f"MoRI ({install('mori')})": find_spec("mori") is not None,
            }
        )
        if reason is None:
            try:
                mori_io()
            except EngineUnavailable as error:
                return str(error)
        return reason

    def register(self, slabs: Sequence[Slab]) -> None:
        """Registers slabs of any memory of this host, before the first `connect`. MoRI hands them
        to NICs when they are first read, and ends the process if a NIC refuses one.
        """
        if self._peers:
            raise TransferError("peers are read already: register all memory before.")
        for slab in slabs:
            kind, _, number = slab.memory.partition(":")
            if slab.memory != HOST and not (kind == "cuda" and number.isdecimal()):
                raise TransferError(
                    f"slab of {slab.nbytes} bytes on {slab.memory}: engine mori moves memory of "
                    f"{HOST} and cuda:N, as torch calls AMD GPUs."
                )
        self._claim([(slab.base, slab.nbytes) for slab in slabs])
        self._slabs.extend(slabs)
        if self._serving is not None:
            self._serving.register(slabs)

    def metadata(self) -> bytes:
        """The serving `IOEngine`, its token and its registrations."""
        if self._serving is None:
            self._serving = self._io()
        io = self._serving
        bases = io.token_base, *(slab.base for slab in self._slabs)
        token, *memory = (bytes(io.memory[base].pack()) for base in bases)
        engine = bytes(io.description().pack())
        return msgspec.msgpack.encode(MoriMetadata(engine, bytes(io.tokens[0]), token, memory))

    def connect(self, metadata: bytes) -> ThreadedPeer:
        """Returns at once: the first read fails if the peer cannot be reached."""
        owner, api = decode_metadata(metadata, MoriMetadata), mori_io()
        try:
            engine = api.EngineDesc.unpack(owner.engine)
            token, *memory = (api.MemoryDesc.unpack(m) for m in (owner.token_memory, *owner.memory))
            Ranges.of((desc.data, desc.size) for desc in (token, *memory))
            if any(desc.engine_key != engine.key for desc in (token, *memory)):
                raise ValueError("memory of another engine.")
            if len(owner.token) != TOKEN_BYTES or token.size < TOKEN_BYTES:
                raise ValueError("a token of another size.")
        except Exception as error:  # those of C++ have no type of their own
            raise TransferError(f"malformed metadata: {error}") from None
        reader = MoriReader(
            engine=engine,
            token=owner.token,
            token_base=token.data,
            memory={desc.data: desc for desc in (token, *memory)},
            ranges=Ranges.of((desc.data, desc.size) for desc in memory),
            own=self._own,
            obtain=self._io,
        )
        return self._connected(f"mori {reader.address}", reader, reader.ranges)

    def close(self) -> None:
        """Gives up all peers at once, and destroys what reads and what serves."""
        peers = list(self._peers)
        super().close()
        for peer in peers:
            peer.join()
        if not (self._serving is None or self._serving.destroy()):
            raise TransferError("MoRI's IOEngine cannot be destroyed: an object refers to it.")

    def _io(self) -> MoriIO:
        io = MoriIO(self._hostname, self._slabs)
        self._warn_exposed(io.description().port)
        return io


def _check_host(hostname: str) -> None:
    """MoRI ends the process if it cannot listen there."""
    try:
        wrong = ipaddress.IPv4Address(hostname).is_unspecified
        with socket.socket() as probe:
            probe.bind((hostname, 0))
    except (ValueError, OSError):
        wrong = True
    if wrong:
        raise ValueError(f"hostname {hostname!r}: must be an IPv4 address of this host.")


def _driver() -> bool:
    return Path("/dev/kfd").exists()


def _active_port() -> bool:
    states = Path("/sys/class/infiniband").glob("*/ports/*/state")
    return any("ACTIVE" in state.read_text() for state in states)
