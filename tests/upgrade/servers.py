"""What runs in a place of the fleet, and the process that runs it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from typing_extensions import Self

from disagg.contract import Contract, ContractRank
from disagg.protocol.versions import fields_lacked
from kvpool.layout import PoolLayout
from tests.compat.golden import keys_of
from tests.processes import Child
from tests.upgrade import child

UP_SECONDS = 120


@dataclass(frozen=True, kw_only=True)
class Build:
    """A release with weights, of which it `says` a fingerprint or nothing. `protocol`: an older
    release is imitated, that says and reads nothing that this number lacks. `tree`: the code of an
    earlier commit runs, which speaks `protocol` at most.
    """

    name: str
    weights: str
    says: bool = True
    protocol: int | None = None
    tree: Path | None = None


class Server:
    """One process of the fleet."""

    def __init__(self, place: str, build: Build, engine: str, folder: Path) -> None:
        self.place, self.build, self.engine = place, build, engine
        self.side = place.rstrip("0123456789")
        self.answered, self.alive, self.leaves = 0, True, False
        setup = {
            "side": self.side,
            "engine": engine,
            "weights": build.weights,
            "conventions": {"weights": build.weights} if build.says else {},
            "protocol": None,
            "keys": {},
        }
        if build.protocol is not None and "conventions" in fields_lacked("hello", build.protocol):
            setup["conventions"] = {}  # it has no word for them
        if build.tree is not None:
            self._process: Any = _run(build.tree, setup)
        else:
            if build.protocol is not None:
                setup |= {"protocol": build.protocol, "keys": keys_of(build.protocol)}
            self._process = Child(child.main, setup)
        self.pipe = self._process.pipe
        self._folder = folder

    def up(self) -> Self:
        """Once it has started: `address` of a prefill, and `source` of its contract."""
        assert self.pipe.poll(UP_SECONDS), f"{self}: it did not start"
        told = self.pipe.recv()
        assert told["event"] == "up", told.get("text", told)
        self.address = told["address"]
        self.source = told["contract"] or self._saved(told)
        return self

    def __str__(self) -> str:
        return f"{self.place} ({self.build.name}, weights {self.build.weights})"

    def _saved(self, told: Mapping[str, Any]) -> str:
        """The contract of a release that serves none, from what it says in its handshake."""
        layout = PoolLayout.from_json(told["layout"])
        contract = Contract(
            engine=self.engine,
            serves=(self.side,),
            size=1,
            ranks=(ContractRank.of(0, layout, told["conventions"], self.address),),
            versions={},
            protocol=self.build.protocol,
        )
        file = self._folder / f"{self.place}.{self.build.name}.json"
        file.write_text(contract.to_json())
        return str(file)

    def send(self, do: str, **order: Any) -> None:
        self.pipe.send({"do": do, **order})

    def kill(self) -> Iterator[dict[str, Any]]:
        """SIGKILL, and what it has still said."""
        self.alive = False
        self._process.process.kill()
        self._process.process.wait() if self.build.tree else self._process.process.join()
        try:
            while True:
                yield self.pipe.recv()
        except (EOFError, OSError):
            self.pipe.close()


@dataclass
class _Program:
    process: subprocess.Popen[bytes]
    pipe: Connection


def _run(tree: Path, setup: Mapping[str, Any]) -> _Program:
    """The same program, with the kvpool of another tree."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, child.__file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": str(tree)},
            cwd=tree,
        )
    pipe = Connection(ours.detach())
    pipe.send(setup)
    return _Program(process, pipe)
