"""Engines of vLLM as far as the layout reads them, without vLLM: specs, modules, configurations."""

from __future__ import annotations

import time
from types import SimpleNamespace

import torch

from disagg.connectors.rank.rank import Rank
from disagg.connectors.settings import Settings
from disagg.connectors.steps import ReceiveTask, SendTask, Step
from disagg.connectors.vllm.layout import engine_layout
from disagg.connectors.vllm.registered import Platform
from disagg.connectors.vllm.scheduler import log
from disagg.connectors.worker import ConnectorWorker
from tests import oracle
from tests.disagg.connectors.vllm import kernels

LATENT, ROPE, D, BLOCKS = 32, 8, 16, 7


class Layers:
    """A rank with layers of one backend: vLLM's views, its layout, and its memory as the oracle
    takes it. `heads`: of the model, `content`: elements a token and head.
    """

    def __init__(
        self, backend, content, *, order="LBHNC", layers=1, block=16, kernel_block=None,
        dtype=torch.bfloat16, mode="NONE", value=D, heads=2, tp=1, rank=0, dcp=1,
        platform=Platform(version="0.32.0"), **said,
    ):  # fmt: skip
        size = kernel_block or block
        shape = BLOCKS * block // size, max(1, heads // tp), size, content
        self.tokens, self.names = block, [name(n) for n in range(layers)]
        self.physical, self.views = kernels.views(order, layers, shape, dtype)
        attention = spec(
            "FullAttentionSpec", block, num_kv_heads=shape[1], head_size=D, head_size_v=value,
            kv_quant_mode=SimpleNamespace(name=mode),
        )  # fmt: skip
        parallel = {"tp": tp, "rank": rank, "decode_context_parallel_size": dcp}
        modules = dict.fromkeys(self.names, module(backend, **said))
        self.seen = engine_layout(
            config(modules, kv_heads=heads, **parallel),
            caches(BLOCKS, [(self.names, attention)]),
            dict(zip(self.names, self.views)),
            platform,
        )
        self.layout = self.seen.layout
        self.state = oracle.over(self.layout, self.physical.view(-1).view(torch.uint8).numpy())


def until(true, *sides, turns=None):
    """Steps of `sides`, and turns of one in whose forward pass that is, until something is so."""
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        for side in sides:
            side.step()
        if turns is not None:
            turns.rank.turn()


GDN = {
    "shapes": ((3, 4 * 8), (2, 8, 8)),
    "dtypes": (torch.bfloat16, torch.float32),
    "mamba_type": SimpleNamespace(name="GDN_ATTN"),
}
"""Of a spec: a delta net of one head of q and k and two of v, of 8."""
GDN_BYTES = 2 * 3 * 32 + 4 * 2 * 8 * 8


def delta_net(view, layer, block):
    """What its kernel writes to a block."""
    conv, temporal = GDN["shapes"]
    return kernels.Slots(
        view, layer, [block], range(2), conv=conv, temporal=temporal, cell_dims=1,
        sections=[("conv.q", 1, 0, 8), ("conv.k", 1, 0, 8), ("conv.v", 2, 0, 8)],
    )  # fmt: skip


class WorkerSide:
    """A worker over a layout, and what its engine was told."""

    def __init__(self, layout, groups, layers, *, produces, model=None, cleared=(), **extra):
        rank = Rank(
            Settings.read(extra, "extra"),
            layout,
            produces=produces,
            consumes=not produces,
            readers=1,
            log=log,
            conventions=model or {},
        )
        self.rank, self.worker = rank, ConnectorWorker(rank, groups, layers, cleared)
        self.sent, self.received, self.failed = set(), set(), set()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.rank.close()

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
