"""A model goes on with a loaded request as with its own: the same logits, bit by bit."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from disagg.connectors.conventions import conventions
from disagg.snapshot import SnapshotRefused, load, save
from kvpool import Allocator
from kvpool.integrations.transformers import PoolCache
from tests.kvpool.integrations.caches import model_of, pool_of, prompt, run

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v4"])
def test_a_model_goes_on_with_a_loaded_request(family, tmp_path):
    model, ids = model_of(family), prompt(1)
    agreed = conventions(model.config)
    pool = pool_of(model)
    prefilled = PoolCache.new(pool, Allocator(pool))
    run(model, prefilled, ids[:, :28], chunks=(11, 17), steps=0)
    (request,) = prefilled.requests
    save(tmp_path / "a", pool.layout, request.address(), conventions=agreed)
    expected = run(model, prefilled, ids[:, 28:], chunks=(1,))

    dest = pool_of(model, page_size=8, placement="page")
    allocator = Allocator(dest)
    allocator.extend(allocator.new_request(), 3)  # so that page ids differ
    loaded = allocator.new_request()
    allocator.extend(loaded, 28, received=True)
    load(tmp_path / "a", dest.layout, loaded.address(), conventions=agreed)
    found = run(model, PoolCache(dest, allocator, [loaded]), ids[:, 28:], chunks=(1,))
    assert all(one.equal(other) for one, other in zip(found, expected, strict=True))
    allocator.check_integrity()


@torch.no_grad()
def test_another_models_request_is_refused(tmp_path):
    """Of equal bytes, but of other numbers that decide what they mean."""
    model = model_of("llama")
    pool = pool_of(model)
    cache = PoolCache.new(pool, Allocator(pool))
    run(model, cache, prompt(1), steps=0)
    address = cache.requests[0].address()
    said = conventions(model.config)
    save(tmp_path / "a", pool.layout, address, conventions=said)
    config = type(model.config).from_dict({**model.config.to_dict(), "rms_norm_eps": 0.5})
    with pytest.raises(SnapshotRefused, match=r"a: rms_norm_eps 1e-06, here 0\.5"):
        load(tmp_path / "a", pool.layout, address, conventions=conventions(config))
