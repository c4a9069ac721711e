"""Device memory that another process maps: what engine `local` and staging buffers build on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import cast

import numpy as np
import torch

from disagg.cli.accept.report import NOT_HERE, Row
from disagg.cli.accept.scope import Scope, Wrong
from disagg.cli.bench.peer import OtherProcess, pattern
from kvpool.device import DeviceUnavailable, IpcHandle, Sharing, get_device

NBYTES = 1 << 20
PARTS = {"a whole allocation": (0, NBYTES), "a part of an allocation": (4096, 100_003)}


def ipc_rows(scope: Scope) -> list[Row]:
    """Whole allocations, parts of them, and what is no handle."""
    if not isinstance(scope.device, Sharing):
        return [Row("ipc", NOT_HERE, "not for this device: it has no `share` and no `attach`.")]
    with closing(OtherProcess(_serve, scope.device.name)) as other:
        parts = [
            scope.tried(name, partial(_mapped, scope.device, scope.device.allocate, other, *part))
            for name, part in PARTS.items()
        ]
    return [*parts, scope.tried("what is no handle is refused", partial(_refused, scope.device))]


def _mapped(
    device: Sharing,
    allocate: Callable[[int], torch.Tensor],
    other: OtherProcess,
    start: int,
    nbytes: int,
) -> str:
    memory = allocate(NBYTES)
    memory.copy_(pattern(NBYTES))
    device.record().synchronize()
    found = other.call("read", device.share(memory.data_ptr() + start, nbytes), nbytes)
    expected = pattern(NBYTES)[start : start + nbytes].numpy()
    wrong = np.flatnonzero(np.frombuffer(found, dtype=np.uint8) != expected)
    if wrong.size:
        raise Wrong(f"byte {wrong[0]:,} of {nbytes:,} is another ({wrong.size:,} differ).")
    return f"another process read {nbytes:,} bytes at {start:,}, and unmapped them"


def _refused(device: Sharing) -> str:
    try:
        device.attach(b"no handle")
    except DeviceUnavailable as error:
        return f"DeviceUnavailable: {error}"
    raise Wrong("attach took bytes that are no handle.")


def _serve(pipe: Connection, name: str) -> None:
    """The other process: maps memory, copies it to its own, and sends the bytes."""
    device = cast("Sharing", get_device(name))  # as `ipc_rows` has found
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            _, (handle, nbytes) = pipe.recv()
            try:
                pipe.send(_read(device, handle, get_device(name).allocate(nbytes)))
            except Exception as error:  # it is told
                pipe.send(f"{type(error).__name__}: {error}")


def _read(device: Sharing, handle: IpcHandle, own: torch.Tensor) -> bytes:
    mapped = device.attach(handle)
    columns = (mapped.base, own.data_ptr(), own.numel())
    device.copy_runs(*(np.array([each]) for each in columns))
    device.record().synchronize()
    found = own.cpu().numpy().tobytes()
    mapped.close()
    mapped.close()  # a second call does nothing
    return found
