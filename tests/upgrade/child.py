"""One endpoint in a process of its own, of today's code or of an earlier commit's: it imports
nothing of the tests, and what it is told and says are plain values.

`python tests/upgrade/child.py FD` runs it with the kvpool that is first on the path.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import torch

from disagg import DecodeEndpoint, PrefillEndpoint, create_engine
from disagg.runtime.options import Options
from disagg.runtime.socket_transport import SocketTransport
from kvpool import Allocator, MLAPool, RequestAddress

try:
    from disagg.contract import Contract, ContractRank, ContractServer
except ImportError:  # of an earlier commit
    ContractServer = None

PR_SET_PDEATHSIG = 1
LAYERS = range(2)
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8}
PAGES = {"prefill": {"page_size": 16, "num_pages": 512}, "decode": {"page_size": 8}}
LOOP_SECONDS = 0.005
PEER_SECONDS = 60.0
"""A process that is killed is noticed by the end of its connection; a busy host is none."""


def state(weights: str, prompt: int, region: int, shape: tuple[int, ...]) -> np.ndarray:
    """What an engine of those weights computes of a prompt: one region's bytes, `[token, byte]`."""
    source = np.random.default_rng([*weights.encode(), prompt, region])
    return source.integers(0, 256, shape, np.uint8)


class Strict(SocketTransport):
    """Frames have only fields that an older release knows: it would refuse any other."""

    def __init__(self, protocol: int, keys: Mapping[str, set[str]]) -> None:
        super().__init__(True)
        self.problems: list[str] = []
        self._protocol, self._keys = protocol, keys

    def send(self, peer: Any, data: bytes) -> str | None:
        self._check("sent", data)
        return super().send(peer, data)

    def poll(self) -> Iterator[tuple[Any, Any]]:
        for peer, data in super().poll():
            if isinstance(data, bytes):
                self._check("received", data)
            yield peer, data

    def _check(self, verb: str, data: bytes) -> None:
        fields = msgspec.msgpack.decode(data)
        if fields["type"] == "hello":
            if fields["protocol"] != self._protocol:
                return  # it is refused for its number, which is read before anything else
            spaces = msgspec.msgpack.decode(fields["layout"]).get("spaces", ())
            unknown = {name for space in spaces for name in space} - self._keys["space"]
            if unknown:
                self.problems.append(f"{verb} a layout with {unknown}")
        if unknown := fields.keys() - self._keys.get(fields["type"], set()):
            self.problems.append(f"{verb} {fields['type']} with {unknown}")


class Served:
    """The endpoint, its pool and its open rooms. `setup` has `side`, `engine`, `weights`,
    `conventions`, and of an older release that is imitated its `protocol` and `keys`.
    """

    def __init__(self, pipe: Connection, setup: Mapping[str, Any]) -> None:
        self.pipe, self.setup = pipe, setup
        self.weights: str = setup["weights"]
        pages = {"num_pages": 1024} | PAGES[setup["side"]]
        self.pool = MLAPool(layers=LAYERS, dtype="bf16", **LATENT, **pages)
        self.allocator = Allocator(self.pool)
        self.rooms: dict[str, tuple[Any, int]] = {}
        """Requests and prompts of rooms whose pages are not back."""
        self.dropped = set[str]()
        """Rooms that a decode has dropped before prefill had them."""
        self.links: dict[str, Any] = {}
        self.conventions = setup["conventions"]
        if "conventions" not in Options.__annotations__:
            self.conventions = None  # that release has none
        self.transport: Any = None
        if setup["protocol"] is None:
            self.endpoint = self.opened(insecure=True)
        else:
            self.transport = Strict(setup["protocol"], setup["keys"])
            with patch("disagg.runtime.endpoint.PROTOCOL", setup["protocol"]):
                self.endpoint = self.opened(transport=self.transport)

    def opened(self, **options: Any) -> Any:
        if self.conventions is not None:
            options["conventions"] = self.conventions
        options["peer_timeout"] = PEER_SECONDS
        engine = create_engine(self.setup["engine"])
        if self.setup["side"] == "decode":
            return DecodeEndpoint(self.pool.layout, engine, verify="checksum", **options)
        return PrefillEndpoint(self.pool.layout, engine, "tcp://127.0.0.1:*", **options)

    def run(self) -> None:
        """Until the parent is gone."""
        address = getattr(self.endpoint, "address", None)
        serves = self.contract(address)
        self.pipe.send(
            {
                "event": "up",
                "address": address,
                "layout": self.pool.layout.to_json(),
                "conventions": self.conventions or {},
                "contract": serves and f"http://{serves.address}",
            }
        )
        while True:
            if self.pipe.poll(LOOP_SECONDS):
                order = self.pipe.recv()
                getattr(self, f"do_{order.pop('do')}")(**order)
            for ended in self.endpoint.ended():
                if ended.room in self.rooms:
                    self.say_ended(ended.room)
                else:
                    self.dropped.add(ended.room)

    def contract(self, address: str | None) -> Any:
        """Where it is served; None of a release that has none."""
        if ContractServer is None:
            return None
        more = {} if self.setup["protocol"] is None else {"protocol": self.setup["protocol"]}
        contract = Contract(
            engine=self.setup["engine"],
            serves=(self.setup["side"],),
            size=1,
            ranks=(ContractRank.of(0, self.pool.layout, self.conventions or {}, address),),
            versions={},
            **more,
        )
        return ContractServer("127.0.0.1:*", contract)

    def request(self, tokens: int) -> tuple[Any, RequestAddress]:
        request = self.allocator.new_request()
        received = self.setup["side"] == "decode"
        self.allocator.extend(request, tokens, received=received)
        return request, request.address()

    def cells(
        self, address: RequestAddress, prompt: int
    ) -> Iterator[tuple[np.ndarray, Any, np.ndarray]]:
        """Of each region all its memory, `[page, entry, byte]`, where a request's tokens are in it,
        and what has to be there.
        """
        positions = np.arange(address.num_tokens)
        pages = address.spans["kv"].ids[positions // self.pool.page_size]
        for number, region in enumerate(self.pool.layout.regions):
            view = self.pool.view(region.role, region.layer)
            memory = view.view(torch.uint8).numpy()
            shape = len(positions), memory.shape[-1]
            values = state(self.weights, prompt, number, shape)
            yield memory, (pages, positions % self.pool.page_size), values

    def do_prefill(self, room: str, prompt: int, tokens: int) -> None:
        """Computes a prompt and offers it, in two chunks."""
        request, address = self.request(tokens)
        self.rooms[room] = request, prompt
        if room in self.dropped:
            self.say_ended(room)
            return
        for memory, cells, values in self.cells(address, prompt):
            memory[cells] = values
        self.endpoint.send(room, address, tokens=range(tokens // 2), last=False)
        self.endpoint.send(room, address, aux={"weights": self.weights})

    def do_decode(self, room: str, prompt: int, tokens: int, address: str) -> None:
        request, table = self.request(tokens)
        self.rooms[room] = request, prompt
        link = self.links.get(address)
        if link is None:
            link = self.links[address] = self.endpoint.connect([address])
        self.endpoint.receive(room, table, link=link)

    def do_forget(self, address: str) -> None:
        """A prefill has left the fleet."""
        link = self.links.pop(address, None)
        if link is not None:
            self.endpoint.disconnect(link)

    def do_abort(self, room: str) -> None:
        with suppress(LookupError, ValueError):  # it has ended meanwhile, or never began
            self.endpoint.abort(room, "the other side was killed")

    def say_ended(self, room: str) -> None:
        request, prompt = self.rooms.pop(room)
        failure = self.endpoint.failure(room)
        told: dict[str, Any] = {"event": "ended", "room": room, "kind": failure and failure.kind}
        told["reason"] = str(failure or "")
        if failure is None and self.setup["side"] == "decode":
            told["wrong"] = sum(
                int((memory[cells] != values).sum())
                for memory, cells, values in self.cells(request.address(), prompt)
            )
            told["by"] = self.endpoint.aux(room)["weights"]
        self.endpoint.forget(room)
        self.allocator.free(request)
        if self.transport is not None and self.transport.problems:
            told["problems"] = self.transport.problems
        self.pipe.send(told)


def main(pipe: Connection, setup: Mapping[str, Any]) -> None:
    """The process. It dies with its parent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        Served(pipe, setup).run()
    except (EOFError, BrokenPipeError):
        return  # the parent is gone
    except BaseException:
        pipe.send({"event": "problem", "text": traceback.format_exc()})
        raise


if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as connection:
        main(connection, connection.recv())
