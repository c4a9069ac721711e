"""Handles of device memory: their encoding, and what is refused."""

from __future__ import annotations

import msgspec
import pytest

from kvpool.device import DeviceUnavailable
from kvpool_cuda import ipc
from kvpool_cuda.device import CUDADevice

GIVEN = ipc.CUDAIpcHandle(bytes(range(64)), 4096, 1 << 30, b"u" * 16)


def test_a_handle_survives_its_encoding():
    assert ipc.decode(msgspec.msgpack.encode(GIVEN)) == GIVEN


@pytest.mark.parametrize(
    "change",
    [
        {"handle": bytes(63)},
        {"handle": bytes(65)},
        {"uuid": b""},
        {"offset": -1},
        {"nbytes": -1},
        {"nbytes": 1 << 63},
        {"offset": "0"},
    ],
)
def test_invalid_fields_are_refused(change):
    fields = {name: getattr(GIVEN, name) for name in GIVEN.__struct_fields__}
    raw = msgspec.msgpack.encode(["kvpool-cuda-ipc-1", *{**fields, **change}.values()])
    with pytest.raises(DeviceUnavailable, match="not a handle of CUDA memory"):
        CUDADevice("cuda:0").attach(raw)


@pytest.mark.parametrize("keep", [0, 1, 20, 60, -1])
def test_truncated_and_foreign_bytes_are_refused(keep):
    whole = msgspec.msgpack.encode(GIVEN)
    for raw in (whole[:keep], b"\x80" + whole, whole.replace(b"ipc-1", b"ipc-2")):
        with pytest.raises(DeviceUnavailable, match="not a handle of CUDA memory"):
            ipc.attach(raw, 0)


def test_a_missing_driver_is_named(monkeypatch):
    monkeypatch.setattr(ipc, "LIBRARY", "libcuda-that-is-not-there.so.1")
    ipc._library.cache_clear()
    try:
        for call in (
            lambda: ipc.share(4096, 16),
            lambda: ipc.attach(msgspec.msgpack.encode(GIVEN), 0),
        ):
            with pytest.raises(DeviceUnavailable, match=r"driver cannot be loaded .*not-there"):
                call()
    finally:
        ipc._library.cache_clear()


def test_an_error_has_the_drivers_name_and_text():
    error = ipc.DriverError("cuIpcOpenMemHandle_v2", "CUDA_ERROR_MAP_FAILED", "mapping failed")
    assert str(error) == "cuIpcOpenMemHandle_v2: CUDA_ERROR_MAP_FAILED (mapping failed)."
    assert error.name == "CUDA_ERROR_MAP_FAILED"
