"""Engine ascend without an NPU: what is missing, what it refuses, and its code over the transport
of the installed Mooncake.
"""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from disagg.engines.base import EngineUnavailable, TransferError
from disagg.engines.mooncake import ascend, package as mooncake
from disagg.engines.mooncake.ascend import ALIGNMENT, AscendEngine
from kvpool.extras import ascend_parts
from kvpool.layout import Slab
from tests.disagg.engines.owners import batch_of, read, slab_of
from tests.disagg.engines.peers import ENGINES


@pytest.mark.parametrize("lacking", [*ascend_parts(), "USE_ASCEND_DIRECT", None])
def test_exactly_the_missing_parts_are_named(monkeypatch, lacking):
    parts = {part: part != lacking for part in ascend_parts()}
    monkeypatch.setattr(ascend, "ascend_parts", lambda: parts)
    monkeypatch.setattr(ascend, "_transport", lambda: lacking != "USE_ASCEND_DIRECT")
    reason = AscendEngine.availability()
    if lacking is None:
        assert (reason is None) == ("mooncake" in ENGINES)
    else:
        assert reason.startswith("missing: ") and ";" not in reason and lacking in reason


def test_a_mooncake_of_another_build_has_no_ascend_transport(another_mooncake):
    library = another_mooncake / "engine.so"
    for content, present in ((b"TcpTransport", False), (b"..21AscendDirectTransportE..", True)):
        library.write_bytes(content)
        assert ascend._transport() == present


@pytest.fixture
def pretended(monkeypatch):
    """Pretends that nothing is missing; records the device that each thread sets."""
    devices = {}

    @contextmanager
    def device(index):
        devices[threading.get_ident()] = index
        yield

    monkeypatch.setattr(AscendEngine, "availability", classmethod(lambda _: None))
    monkeypatch.setitem(
        sys.modules, "torch_npu", SimpleNamespace(npu=SimpleNamespace(device=device))
    )
    for switch in ("MC_FORCE_TCP", "MC_FORCE_HCA"):
        monkeypatch.delenv(switch, raising=False)
    return devices


@pytest.mark.parametrize(
    ("slabs", "sentence"),
    [
        ([Slab(ALIGNMENT, ALIGNMENT)], "on cpu: engine ascend moves NPU memory only"),
        ([Slab(ALIGNMENT, 5, "cuda:0")], "on cuda:0: engine ascend moves NPU memory only"),
        (
            [Slab(ALIGNMENT, 5, "npu:0"), Slab(2 * ALIGNMENT, 5, "npu:1")],
            "on npu:1, others on npu:0: an engine serves one memory",
        ),
        (
            [Slab(3 * ALIGNMENT + 512, 5, "npu:0")],
            "at 0x600200 on npu:0 does not start at a multiple of 2 MiB. Allocate 2 MiB more",
        ),
        (
            [Slab(2 * number * ALIGNMENT, 5, "npu:0") for number in range(257)],
            "257 regions: engine ascend registers at most 256. Put all buffers into one slab",
        ),
    ],
)
def test_slabs_that_an_npu_cannot_register_are_refused(pretended, monkeypatch, slabs, sentence):
    monkeypatch.setattr(mooncake, "package", lambda: None)
    with pytest.raises(TransferError, match=sentence):
        AscendEngine().register(slabs)
    assert not pretended


def test_chunks_count_as_regions_and_are_multiples_of_2_mib(pretended, monkeypatch):
    monkeypatch.setattr(mooncake, "package", lambda: None)
    engine = AscendEngine(chunk=ALIGNMENT)
    with pytest.raises(TransferError, match="257 regions"):
        engine.register([Slab(ALIGNMENT, 256 * ALIGNMENT + 1, "npu:0")])
    with pytest.raises(ValueError, match="a multiple of 2 MiB"):
        AscendEngine(chunk=ALIGNMENT + 1)
    with pytest.raises(TransferError, match="register memory of an NPU first"):
        AscendEngine().metadata()


def test_a_process_that_uses_mooncake_over_tcp_has_no_ascend(pretended, monkeypatch):
    monkeypatch.setattr(mooncake, "package", lambda: None)
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    with pytest.raises(EngineUnavailable, match="MC_FORCE_TCP is set, so this process uses tcp"):
        AscendEngine()


if "mooncake" in ENGINES:

    def aligned(size):
        """Host memory in place of an NPU's: the installed Mooncake moves it over TCP."""
        memory = np.zeros(size + ALIGNMENT, dtype=np.uint8)
        return memory[-memory.ctypes.data % ALIGNMENT :][:size]

    def test_every_thread_sets_the_device_and_slabs_are_read_in_chunks(pretended):
        source, dest = aligned(3 * ALIGNMENT), aligned(3 * ALIGNMENT)
        source[:] = np.arange(source.size, dtype=np.uint32) >> 5
        engines = [AscendEngine(chunk=ALIGNMENT) for _ in range(2)]
        for engine, memory in zip(engines, (source, dest)):
            engine.register([slab_of(memory, "npu:3")])
        serving, reading = engines
        peer = reading.connect(serving.metadata())
        run = (source.ctypes.data + 7, dest.ctypes.data + 7, source.nbytes - 7)
        read(reading, peer, batch_of(run))
        assert np.array_equal(dest[7:], source[7:]) and not dest[:7].any()
        assert reading.fence(peer, 0)
        assert pretended == {threading.get_ident(): 3, peer._thread.ident: 3}
        for engine in engines:
            engine.close()
