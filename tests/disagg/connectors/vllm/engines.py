"""Engines of vLLM as far as the layout reads them, without vLLM: specs, modules, configurations."""

from __future__ import annotations

from types import SimpleNamespace

from disagg.connectors.rank import Rank
from disagg.connectors.settings import Settings
from disagg.connectors.vllm.scheduler import ReceiveTask, SendTask, Step, log
from disagg.connectors.vllm.worker import ConnectorWorker

LATENT, ROPE = 32, 8


class WorkerSide:
    """A worker over a layout, and what its engine was told."""

    def __init__(self, layout, groups, layers, *, produces, model=None, **extra):
        rank = Rank(
            Settings.read(extra, "extra"),
            layout,
            produces=produces,
            consumes=not produces,
            readers=1,
            log=log,
            conventions=model or {},
        )
        self.rank, self.worker = rank, ConnectorWorker(rank, groups, layers)
        self.sent, self.received, self.failed = set(), set(), set()

    def step(self, finished=("p",), **what):
        """One step of its engine, which has finished these requests before it."""
        step = Step(**what)
        self.worker.begin(step)
        self.worker.save(step)
        results = self.worker.results(finished)
        self.sent |= results.sent
        self.received |= results.received
        self.failed |= results.failed


def send(blocks, start, stop, last, room="room"):
    """What a scheduler has workers send of request p."""
    return SendTask(request="p", room=room, blocks=blocks, start=start, stop=stop, last=last)


def receive(source, blocks, start, stop):
    """What a scheduler has workers receive for request d."""
    return ReceiveTask(request="d", source=source, blocks=blocks, start=start, stop=stop)


def spec(kind: str, block_size: int, **more):
    """A spec of a class of that name, with the fields of vLLM's (v1/kv_cache_interface.py)."""
    fields = {
        "block_size": block_size,
        "dcp_sharded": kind != "MambaSpec",
        "tokens_per_state": 1,
        "kv_quant_mode": SimpleNamespace(name="NONE"),
        "sliding_window": None,
        "extra_retained_tokens": 0,
        "mamba_cache_mode": "none",
    }
    made = type(kind, (SimpleNamespace,), {})(**{**fields, **more})
    if hasattr(made, "head_size") and not hasattr(made, "head_size_v"):
        made.head_size_v = made.head_size
    return made


class Module(SimpleNamespace):
    """An attention module: its backend, and what else it says."""

    def get_attn_backend(self):
        return self.backend


def module(backend: str, **said):
    """A module whose backend has a name, and nothing more."""
    return Module(backend=SimpleNamespace(get_name=lambda: backend), **said)


def config(modules, *, layers=8, kv_heads=2, tp=1, rank=0, latent=LATENT, rope=ROPE, **parallel):
    """The part of a VllmConfig that is read. `rank`: of all ranks of the engine."""
    text = SimpleNamespace(kv_lora_rank=latent, qk_rope_head_dim=rope, index_head_dim=128)
    model = SimpleNamespace(
        model="/models/tiny/",
        hf_text_config=text,
        get_total_num_hidden_layers=lambda: layers,
        get_total_num_kv_heads=lambda: kv_heads,
    )
    held = {
        "tensor_parallel_size": tp,
        "rank": rank,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "cp_kv_cache_interleave_size": 1,
    }
    return SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(**{**held, **parallel}),
        compilation_config=SimpleNamespace(static_forward_context=modules),
        speculative_config=None,
        num_speculative_tokens=0,
    )


def caches(blocks: int, groups):
    """A KVCacheConfig of groups of (layer names, spec)."""
    held = [SimpleNamespace(layer_names=list(names), kv_cache_spec=spec) for names, spec in groups]
    return SimpleNamespace(
        num_blocks=blocks, kv_cache_groups=held, transfer_group_ids=range(len(held))
    )


def name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.attn"
