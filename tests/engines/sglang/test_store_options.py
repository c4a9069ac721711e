"""What the store cannot serve ends SGLang's start by name, before anything is read or written."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

from sglang.srt import runtime_context
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.mem_cache import registry
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs

from disagg.connectors import sglang_store
from disagg.connectors.conventions import conventions
from disagg.connectors.settings import Settings
from disagg.connectors.sglang import register
from disagg.connectors.sglang.conventions import engine_conventions
from disagg.connectors.sglang_store import start
from tests.engines.sglang.test_options import LLAMA

SETTINGS = Settings(store="memory://x")


@dataclass
class Params:
    """What SGLang builds its cache of, as far as it is asked for."""

    page_size: int = 1
    pp_size: int = 1
    attn_cp_size: int = 1
    enable_mamba_extra_buffer: bool = False
    token_to_kv_pool_allocator: object = None


@pytest.fixture
def resolved(tmp_path):
    """SGLang's server arguments, as it resolves and checks them."""
    register()
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))

    def make(**options):
        args = ServerArgs(
            model_path=str(tmp_path),
            device="cpu",
            skip_tokenizer_init=True,
            radix_cache_backend="kvpool",
            **options,
        )
        args.resolve_once()
        return args

    return make


@contextmanager
def context(args, **more):
    """What SGLang's factory is given, in the context of these arguments."""
    place = runtime_context.SpawnRanks(world_rank=0, gpu_id=0, dp_rank=None)
    made = runtime_context.create_context(args, role="scheduler", ranks=place)
    given = {
        "server_args": args,
        "params": Params(),
        "is_hybrid_swa": False,
        "full_tokens_per_layer": 1,
        "enable_hierarchical_cache": False,
        "disable_radix_cache": False,
        **more,
    }
    with runtime_context.use_context(made):
        yield SimpleNamespace(**given)


@pytest.fixture(autouse=True)
def hooked(monkeypatch):
    def init(*_):
        pass

    init.__wrapped__ = init
    monkeypatch.setattr(Scheduler, "__init__", init)


def test_what_can_be_is_not_refused(resolved):
    with context(resolved()) as ctx:
        assert list(start.refused(ctx, SETTINGS)) == []
    with context(resolved(disaggregation_mode="prefill"), params=Params(page_size=16)) as ctx:
        assert list(start.refused(ctx, SETTINGS)) == []


REFUSED = {
    "pp_size 2. Use 1": {"params": Params(pp_size=2)},
    "attn_cp_size 2. Use 1": {"params": Params(attn_cp_size=2)},
    "disable_radix_cache. Use a radix cache": {"disable_radix_cache": True},
    "enable_hierarchical_cache. Use the store alone": {"enable_hierarchical_cache": True},
    "a model of windows alone": {"is_hybrid_swa": True, "full_tokens_per_layer": 0},
    "windows in a ring a request": {
        "params": Params(token_to_kv_pool_allocator=SimpleNamespace(swa_req_ring=True))
    },
    "strategy extra_buffer. Use no_buffer": {"params": Params(enable_mamba_extra_buffer=True)},
    "page_size 96, which does not divide chunk_tokens 256": {"params": Params(page_size=96)},
}
OPTIONS = {
    "enable_memory_saver. Use memory that stays": {"enable_memory_saver": True},
    "enable_lmcache. Use the store alone": {"enable_lmcache": True},
    "enable_flexkv. Use the store alone": {"enable_flexkv": True},
    "enable_unified_memory. Use a pool": {"enable_unified_memory": True},
    "enable_hisparse. Use the device's pool": {"enable_hisparse": True},
    "enable_streaming_session. Use requests": {"enable_streaming_session": True},
    "speculative_algorithm EAGLE. Use none": {"speculative_algorithm": "EAGLE"},
    "enable_linear_replayssm. Use states": {"enable_linear_replayssm": True},
    "dllm_algorithm. Use a model": {"dllm_algorithm": "LowConfidence"},
    "disaggregation_mode decode. Use it on prefill": {"disaggregation_mode": "decode"},
}


@pytest.mark.parametrize("words", REFUSED)
def test_pools_and_places_are_refused(words, resolved, monkeypatch):
    monkeypatch.setenv("KVPOOL_SGLANG", json.dumps({"store": "memory://x"}))
    says = pytest.raises(ValueError, match=f"radix cache kvpool does not know .*{words}")
    with context(resolved(), **REFUSED[words]) as ctx, says:
        start.make_cache(ctx)


@pytest.mark.parametrize("words", OPTIONS)
def test_options_are_refused(words, resolved, monkeypatch):
    monkeypatch.setenv("KVPOOL_SGLANG", json.dumps({"store": "memory://x"}))
    args = resolved()
    assert all(hasattr(args, name) for name in OPTIONS[words])
    names = [
        *("speculative_algorithm", "disaggregation_mode", "enable_lmcache", "enable_flexkv"),
        *("enable_memory_saver", "enable_unified_memory", "enable_hisparse"),
        *("enable_streaming_session", "dllm_algorithm", "enable_linear_replayssm"),
    ]
    said = SimpleNamespace(**{name: getattr(args, name) for name in names} | OPTIONS[words])
    says = pytest.raises(ValueError, match=f"radix cache kvpool does not know {words}")
    with context(args) as ctx, says:
        ctx.server_args = said
        start.make_cache(ctx)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}, "enable_dp_attention. Use ten"),
        ({"tp_size": 2, "dcp_size": 2}, "dcp_size above 1. Use 1"),
    ],
)
def test_ranks_that_share_otherwise_are_refused(options, words, resolved, monkeypatch):
    monkeypatch.setenv("KVPOOL_SGLANG", json.dumps({"store": "memory://x"}))
    says = pytest.raises(ValueError, match=f"radix cache kvpool does not know {words}")
    with context(resolved(**options)) as ctx, says:
        start.make_cache(ctx)


def test_an_older_sglang_is_refused(resolved, monkeypatch):
    monkeypatch.delattr(BasePrefixCache, "checkpoint")
    with context(resolved()) as ctx:
        assert ("this SGLang", "0.5.23 or later") in start.refused(ctx, SETTINGS)


def test_a_scheduler_that_is_not_hooked_is_refused(resolved, monkeypatch):
    monkeypatch.setattr(Scheduler, "__init__", lambda *_: None)
    with context(resolved()) as ctx:
        ((what, instead),) = start.refused(ctx, SETTINGS)
    assert "without its hook" in what
    assert "SGLANG_PLUGINS" in instead


def test_a_store_without_a_url_is_refused(resolved, monkeypatch):
    monkeypatch.setenv("KVPOOL_SGLANG", "{}")
    with context(resolved()) as ctx, pytest.raises(ValueError, match="KVPOOL_SGLANG names no sto"):
        start.make_cache(ctx)


def test_weights_are_known_by_their_files(tmp_path):
    model = SimpleNamespace(model_path=str(tmp_path), revision=None)
    assert start.digest(model) is None
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert start.digest(model) == conventions({}, folder=tmp_path)["weights"]
    assert start.digest(SimpleNamespace(model_path="no/such", revision=None)) is None


def test_random_weights_are_not_those_of_the_files(tmp_path):
    folder = tmp_path / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    config = SimpleNamespace(hf_text_config={}, model_path=str(folder), quantization=None)

    assert {"weights", "revision"} <= engine_conventions(config, []).keys()
    assert not {"weights", "revision"} & engine_conventions(config, [], loaded=False).keys()


def test_the_backend_and_its_hooks_are_registered(resolved):
    resolved()
    assert "kvpool" in registry.registered_radix_cache_backends()
    targets = [name for name in HookRegistry._hooks if "weight_updater" in name]
    assert len(targets) == 4
    for target in targets:
        path, _, name = target.rpartition(".")
        assert path.endswith(SchedulerWeightUpdaterManager.__name__)
        assert hasattr(SchedulerWeightUpdaterManager, name)


def test_hooks_leave_other_caches_alone():
    told = []
    cache = SimpleNamespace(flows=[], turn_off=told.append)
    for tree, on in ((cache, True), (SimpleNamespace(), False)):
        scheduler = SimpleNamespace(tree_cache=tree, enable_lmcache=False)
        sglang_store._made(None, scheduler, "args")
        assert scheduler.enable_lmcache == on
        sglang_store._weights_changed(SimpleNamespace(scheduler=scheduler), "request")
    assert told == ["its weights were updated."]
