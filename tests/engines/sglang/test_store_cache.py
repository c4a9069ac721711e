"""SGLang's radix cache over a store: real pools, allocators and tree, without an engine."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang")

from tests.engines.sglang import sides
from tests.engines.sglang.caches import CHUNK, Side, contexts
from tests.engines.vllm.engines import prompts


@pytest.fixture(autouse=True)
def pools(monkeypatch):
    monkeypatch.setattr(sides, "PAGES", 601)
    with contexts():
        yield


@pytest.mark.parametrize("core", ["rust", "python"])
@pytest.mark.parametrize("kind", ["mha", "mla", "swa"])
@pytest.mark.parametrize(("there", "here"), [(1, 16), (16, 1), (64, 16)])
def test_a_prompt_that_another_engine_has_computed_is_read(kind, there, here, core, tmp_path):
    (prompt,), url = prompts(300), f"file://{tmp_path}"
    with Side(url, there, kind=kind, core=core) as writes:
        assert writes.serves(prompt) == 0
        assert writes.whole()
    with Side(url, here, kind=kind, core=core) as reads:
        req = reads.request(prompt)
        assert reads.waits(req) == 299 // CHUNK * CHUNK
        assert reads.holds(req)
        reads.computes(req)
        reads.ends(req)
        assert reads.whole()
        assert reads.store.stats().counts["written"] == 0
