"""SGLang's queues of a rank over pools on CPU tensors, with our KV manager, senders and receivers:
what its scheduler makes and calls for a request, without models and processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from sglang.srt.disaggregation import decode, prefill
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer
from sglang.srt.disaggregation.utils import (
    MetadataBuffers,
    TransferBackend,
    get_kv_class,
    is_mla_backend,
)
from sglang.srt.observability.trace import TraceNullContext
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.speculative.multi_layer_eagle_worker_v2 import MultiLayerEagleWorkerV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from disagg.connectors import sglang as backend
from disagg.connectors.sglang.transfers import KvpoolReceiver, KvpoolSender
from tests.engines.sglang.oracle import Side
from tests.engines.sglang.sides import state_indices
from tests.ports import free_port

ROOM, PATIENCE = 7, 20.0
PREFILL_ROW, DECODE_ROW = 1, 3
"""Of the metadata."""
BASES = {"prefill": prefill.PrefillBootstrapQueue, "decode": decode.DecodePreallocQueue}


@dataclass(frozen=True, kw_only=True)
class Model:
    """What SGLang's `ModelConfig` says of a model, target or draft."""

    layers: int = 4
    heads: int = 4
    hidden: int = 32
    fields: dict[str, Any] = field(default_factory=dict)

    def config(self) -> Any:
        numbers = [n for n in range(self.layers) if n % 4 == 3]  # of attention in `sides.hybrid`
        text = {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "full_attention_layer_ids": numbers,
            **self.fields,
        }
        return SimpleNamespace(
            hf_text_config=SimpleNamespace(**text),
            get_total_num_kv_heads=lambda: self.heads,
            num_hidden_layers=self.layers,
            model_path="",
            quantization=None,
        )


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One engine of a pair: the ranks of each of its pipeline stages. What drafts is in the last
    one, as SGLang has it.
    """

    stages: Sequence[Sequence[Side]]
    model: Model = Model()
    draft: Model | None = None
    speculation: str = "EAGLE"
    topk: int = 1
    group: Any = None
    """Of tensor parallelism, if the draft is not divided as its target is."""

    @property
    def sides(self) -> list[Side]:
        return [side for stage in self.stages for side in stage]

    @property
    def algorithm(self) -> SpeculativeAlgorithm:
        return SpeculativeAlgorithm[self.speculation if self.draft else "NONE"]

    def options(self, role: str, port: int) -> dict[str, Any]:
        """Of SGLang's `ServerArgs`."""
        return {
            "device": "cpu",
            "disaggregation_mode": role,
            "disaggregation_bootstrap_port": port,
            "tp_size": len(self.stages[0]),
            "pp_size": len(self.stages),
            "speculative_eagle_topk": self.topk,
            "speculative_num_steps": 3,
            "enable_multi_layer_eagle": any(side.modules for side in self.sides),
        }


class Pipeline:
    """SGLang's process group of the stages of one rank, in one process."""

    value: Any = None

    def broadcast_object(self, value: Any, src: int) -> Any:
        self.value = self.value if value is None else value
        return self.value


def worker_of(engine: Engine, side: Side) -> Any:
    """SGLang's worker that drafts: how it names its pools is SGLang's own code."""
    if engine.draft is None:
        return None
    kind = MultiLayerEagleWorkerV2 if side.modules else EAGLEWorkerV2
    worker = object.__new__(kind)
    worker._target_worker = SimpleNamespace(
        model_runner=SimpleNamespace(spec_algorithm=engine.algorithm)
    )
    runners = [
        SimpleNamespace(
            token_to_kv_pool=pool,
            req_to_token_pool=slots_of(side),
            model_config=model,
            model=torch.nn.Module(),
        )
        for pool, model in ((pool, engine.draft.config()) for pool in side.drafts)
    ]
    layout = SimpleNamespace(tp_group=engine.group)
    drafts = SimpleNamespace(draft_runners=runners, parallel_layout=layout)
    worker._draft_worker = drafts if runners else None
    return worker


def slots_of(side: Side) -> Any:
    """As `HybridReqToTokenPool`: its requests' slots of linear attention, if any."""
    return SimpleNamespace(mamba_pool=getattr(side.target, "mamba_pool", None))


def metadata_of(engine: Engine, seed: int) -> MetadataBuffers:
    """As the scheduler sizes them (`init_disaggregation`), with other requests' bytes."""
    hidden, dtype = 16, torch.float32
    if engine.draft is not None and engine.algorithm.carries_draft_hidden_states():
        hidden, dtype = engine.draft.hidden, torch.bfloat16
    buffers = MetadataBuffers(4, hidden, dtype, 8)
    random = np.random.default_rng(seed)
    for tensor in tensors_of(buffers).values():
        noise = random.integers(0, 100, tensor.view(torch.uint8).shape, dtype=np.uint8)
        tensor.view(torch.uint8).copy_(torch.from_numpy(noise))
    return buffers


def tensors_of(buffers: MetadataBuffers) -> dict[str, torch.Tensor]:
    return {name: t for name, t in vars(buffers).items() if isinstance(t, torch.Tensor)}


def queue_of(engine: Engine, side: Side, role: str, metadata: MetadataBuffers) -> Any:
    """SGLang's queue with the attributes that its `_init_kv_manager` reads, which is run."""
    options = get_context().server_args
    worker, parallel = worker_of(engine, side), get_parallel()
    queue: Any = object.__new__(BASES[role])
    queue.token_to_kv_pool = side.target
    queue.draft_token_to_kv_pool = worker.primary_draft_kv_pool if worker else None
    queue.is_mla_backend = is_mla_backend(side.target)
    queue.metadata_buffers = metadata
    queue.tp_rank, queue.pp_rank = parallel.tp_rank, parallel.pp_rank
    queue.gpu_id, queue.enable_staging, queue.queue = None, False, []
    queue.transfer_backend = TransferBackend(backend.BACKEND)
    queue.transfer_queue = SimpleNamespace(metadata_buffers=metadata)
    queue.req_to_token_pool = slots_of(side)
    runner = SimpleNamespace(model=torch.nn.Module(), kv_cache_dtype_str="auto")
    queue.scheduler = SimpleNamespace(
        model_config=engine.model.config(),
        tp_worker=SimpleNamespace(model_runner=runner),
        sliding_window_size=side.window,
        req_to_token_pool=queue.req_to_token_pool,
        spec_algorithm=engine.algorithm,
        draft_worker=worker,
        server_args=options,
        rust_server=None,
        enable_hisparse=False,
    )
    queue.kv_manager = backend._make_manager(BASES[role]._init_kv_manager, queue)
    return queue


def close(manager: Any) -> None:
    manager.rank.close()
    manager.server_socket.close(linger=0)
    if hasattr(manager.request_status, "close"):  # of pipeline stages
        manager.request_status.close()


@contextmanager
def started(engine: Engine, role: str, port: int) -> Iterator[list[Any]]:
    """The queues of all ranks, whose metadata is one stage's after the other's."""
    backend.register()
    ours = partial(backend._kv_class, get_kv_class)
    groups, queues = [Pipeline() for _ in engine.stages[0]], []
    with ExitStack() as stack:
        stack.enter_context(get_context().override_server_args(**engine.options(role, port)))
        for module in (prefill, decode):
            stack.enter_context(mock.patch.object(module, "get_kv_class", ours))
        for stage, sides in enumerate(engine.stages):
            for side in sides:
                place = {"tp_rank": side.rank, "attn_tp_rank": side.rank, "pp_rank": stage}
                rest = dict.fromkeys(("attn_dp_rank", "attn_cp_rank", "attn_dcp_rank"), 0)
                rest |= {"dp_rank": None, "pp_group": groups[side.rank]}
                with get_parallel().override(**place, **rest):
                    metadata = metadata_of(engine, 10 * stage + side.rank)
                    queues.append(queue_of(engine, side, role, metadata))
                    stack.callback(close, queues[-1].kv_manager)
        yield queues


@contextmanager
def pair(source: Engine, dest: Engine) -> Iterator[tuple[list[Any], list[Any], str]]:
    """Queues of prefill and of decode, and where SGLang's bootstrap server is."""
    port = free_port()
    server = CommonKVBootstrapServer("127.0.0.1", port)
    try:
        with started(source, "prefill", port) as there, started(dest, "decode", port) as here:
            yield there, here, f"127.0.0.1:{port}"
    finally:
        server.close()


def receive(queue: Any, side: Side, address: str) -> KvpoolReceiver:
    """What decode's queue calls for a request."""
    manager, ask = queue.kv_manager, side.request
    assert manager.try_ensure_parallel_info(address)
    receiver = KvpoolReceiver(manager, address, ROOM)
    receiver.init(0)
    untraced = SimpleNamespace(trace_ctx=TraceNullContext())
    req = SimpleNamespace(origin_input_ids=[0] * ask.tokens, output_ids=[], time_stats=untraced)
    queue.queue.append(SimpleNamespace(kv_receiver=receiver, req=req))
    indices = state_indices([kind.value for kind in manager.kv_args.state_types], side)
    receiver.send_metadata(ask.pages, DECODE_ROW, indices, decode_prefix_len=0)
    return receiver


def send(sender: KvpoolSender, side: Side, chunk: int) -> None:
    """What prefill's scheduler calls for a request whose first `chunk` pages it sends before."""
    ask, kinds = side.request, sender.kv_mgr.kv_args.state_types
    if chunk:
        sender.send(ask.pages[:chunk], None, num_kv_tokens=chunk * ask.page)
    indices = state_indices([kind.value for kind in kinds], side)
    sender.send(ask.pages[chunk:], indices, num_kv_tokens=ask.tokens - chunk * ask.page)


def until(done: Callable[[], bool], what: Callable[[], str]) -> None:
    end = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < end, what()
        time.sleep(0.001)


def transfer(source: Engine, dest: Engine, queues: Any, chunk: int = 0) -> list[str]:
    """Moves a request as SGLang's schedulers do: of prefill's stages, the senders of the first are
    polled. Returns why its ranks on decode have failed, if any has.
    """
    there, here, address = queues
    receivers = [receive(queue, side, address) for queue, side in zip(here, dest.sides)]
    senders = [KvpoolSender(queue.kv_manager, address, ROOM) for queue in there]
    polled = senders[: len(source.stages[0])]
    poll = "poll_pp_consensus" if len(source.stages) > 1 else "poll"
    for sender, side in zip(senders, source.sides):
        sender.init(len(side.request.pages), PREFILL_ROW)

    def states() -> list[Any]:
        return [*(getattr(one, poll)() for one in polled), *(one.poll() for one in receivers)]

    ends = KVPoll.Success, KVPoll.Failed
    until(
        lambda: (
            all(state != KVPoll.Bootstrapping for state in states()[: len(polled)])
            or KVPoll.Failed in states()
        ),
        lambda: f"not asked: {states()}",
    )
    if KVPoll.Failed not in states():
        for sender, side in zip(senders, source.sides):
            send(sender, side, chunk)
    until(
        lambda: KVPoll.Failed in states() or all(state in ends for state in states()),
        lambda: f"not handed over: {states()}",
    )
    return [why for queue in (*here, *there) for why in queue.kv_manager.failure_records.values()]
