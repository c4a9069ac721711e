"""Runs `kvpool accept` in a process of its own, and devices that it is run on."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import torch

from disagg.cli.accept.report import Report
from kvpool.device import DeviceUnavailable, torch_ops
from kvpool.device.cpu import CPUDevice
from tests.kvpool.cli.plugins import package
from tests.kvpool.testing.test_conformance import Late

ROOT = Path(__file__).parents[3]
COMMAND = "import typer; from disagg.cli.accept.command import accept; typer.run(accept)"


def accepted(folder: Path, device: str, *options: str, timeout: float = 280):
    """Exit status, printed text and report."""
    environment = dict(os.environ)
    if device == "interpret":
        environment["TRITON_INTERPRET"] = "1"  # read when triton is imported
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "--device", device, "--out", device, *options],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    report = msgspec.json.decode((folder / device / "accept.json").read_bytes(), type=Report)
    return done.returncode, done.stdout, report


class WrongByte(CPUDevice):
    """Stores one byte of the first quantised row of a call wrongly."""

    def store_rows(self, rows, locations):
        torch_ops.store_rows(rows, locations)
        for view, _, scales in rows:
            if scales is not None and len(locations):
                item, entry = divmod(int(locations[0]), view.shape[1])
                view.view(torch.uint8)[item, entry].flatten()[0] ^= 1


class Crashing(CPUDevice):
    """Ends its process when items are copied."""

    def copy_items(self, views, src, dst, disjoint=False):
        os._exit(7)


class Handed(CPUDevice):
    """Host memory that other processes map by a handle, as they map a GPU's."""

    def __init__(self, name="handed"):
        super().__init__(name)
        self._files = {}

    def allocate(self, nbytes, alignment=None):
        step = alignment or self.alignment
        file = os.memfd_create("handed")
        os.ftruncate(file, nbytes + step)
        wider = torch.frombuffer(mmap.mmap(file, nbytes + step), dtype=torch.uint8)
        self._files[wider.data_ptr(), nbytes + step] = file
        return wider[-wider.data_ptr() % step :][:nbytes]

    def share(self, base, nbytes):
        for (start, size), file in self._files.items():
            if start <= base and base + nbytes <= start + size:
                return msgspec.msgpack.encode((os.getpid(), file, base - start, nbytes))
        raise DeviceUnavailable("that is no memory of this device.")

    def attach(self, handle):
        try:
            pid, number, offset, nbytes = msgspec.msgpack.decode(
                handle, type=tuple[int, int, int, int]
            )
        except msgspec.MsgspecError as error:
            raise DeviceUnavailable(f"not a handle: {error}") from None
        file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        memory = mmap.mmap(file, offset + nbytes)
        os.close(file)
        return MappedFile(np.frombuffer(memory, dtype=np.uint8)[offset:])


class Beyond(Handed):
    """Maps memory a byte too far."""

    def share(self, base, nbytes):
        return super().share(base + 1, nbytes)


class MappedFile:
    def __init__(self, memory):
        self._memory = memory
        self.base, self.nbytes = memory.ctypes.data, memory.nbytes

    def close(self):
        self._memory = None


class Waiting(Late):
    """Works asynchronously, but copies items before it returns."""

    def copy_items(self, views, src, dst, disjoint=False):
        super().copy_items(views, src, dst, disjoint)
        self.record().synchronize()


class Unordered(Late):
    """Works asynchronously, and reads before earlier work has ended."""

    def load_rows(self, rows, locations):
        return torch_ops.load_rows(rows, locations)


def install(folder: Path) -> None:
    """The devices above, as a package installs them."""
    kinds = WrongByte, Crashing, Handed, Beyond, Late, Waiting, Unordered
    lines = [f"{kind.__name__.lower()} = {__name__}:{kind.__name__}" for kind in kinds]
    package(folder, "accepted", "\n".join(["[kvpool.devices]", *lines]))
