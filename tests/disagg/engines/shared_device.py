"""A device whose memory other processes map by a path and whose copies run on a thread, as those of
an accelerator do: what engine local asks of devices, with real memory and real processes.
"""

from __future__ import annotations

import mmap
import os
import threading
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from unittest import mock

import msgspec
import numpy as np
import torch

from kvpool import device as registry
from kvpool.device import DeviceUnavailable
from kvpool.device.host_copy import copy_runs

HERE = EntryPoint("shm", f"{__name__}:SharedDevice", "kvpool.devices")


@contextmanager
def installed():
    """Registers the device, as an installed package would."""
    with mock.patch.object(registry, "device_entries", lambda: {"shm": HERE}):
        registry.get_device.cache_clear()
        yield
    registry.get_device.cache_clear()


def there(layout, memory):
    """The layout with its buffers in a device's memory."""
    return replace(layout, buffers=tuple(replace(b, memory=memory) for b in layout.buffers))


class Event:
    def __init__(self):
        self._over = threading.Event()

    def query(self):
        return self._over.is_set()

    def synchronize(self):
        self._over.wait()

    def end(self):
        self._over.set()


@dataclass
class Mapped:
    memory: np.ndarray
    closed: bool = False

    @property
    def base(self):
        return self.memory.ctypes.data

    @property
    def nbytes(self):
        return self.memory.nbytes

    def close(self):
        self.closed = True


class SharedDevice:
    """Copies do not start while `held` is locked."""

    memory_kind = "shm"
    alignment = 4096

    def __init__(self, name):
        self.name, self.held, self.attached = name, threading.Lock(), []
        self._files, self._last = {}, None

    def availability(self):
        return None if self.name in ("shm:0", "shm:1") else f"there is no {self.name}."

    def allocate(self, nbytes):
        handle = os.memfd_create("device")
        os.ftruncate(handle, nbytes)
        memory = torch.frombuffer(mmap.mmap(handle, nbytes), dtype=torch.uint8)
        self._files[memory.data_ptr()] = handle
        return memory

    def share(self, base, nbytes):
        if base not in self._files:
            raise DeviceUnavailable("that is not where an allocation begins.")
        return msgspec.msgpack.encode([os.getpid(), self._files[base], nbytes])

    def attach(self, handle):
        try:
            pid, number, nbytes = msgspec.msgpack.decode(handle, type=tuple[int, int, int])
            file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        except (msgspec.MsgspecError, OSError) as error:
            raise DeviceUnavailable(f"it cannot be mapped: {error}") from None
        self.attached.append(Mapped(np.frombuffer(mmap.mmap(file, nbytes), dtype=np.uint8)))
        os.close(file)
        return self.attached[-1]

    def copy_runs(self, src, dst, nbytes):
        runs, before, event = [column.copy() for column in (src, dst, nbytes)], self._last, Event()

        def copy():
            if before is not None:
                before.synchronize()
            with self.held:
                copy_runs(*runs)
            event.end()

        self._last = event
        threading.Thread(target=copy, daemon=True).start()

    def record(self):
        return self._last
