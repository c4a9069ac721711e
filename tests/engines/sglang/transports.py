"""SGLang's own transports without its servers: which bytes its Mooncake and NIXL managers copy.

Their methods run as they are, on objects that were not started: the engine below them copies within
this process. What they would write outside the memory of decode's pools is counted, and not done.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from tests.engines.sglang import oracle
from tests.engines.sglang.oracle import Side
from tests.engines.sglang.sides import own_args, state_indices

PEER = "decode"


class Refused(Exception):
    """A manager gave a reason."""


class Memory:
    """Copies within this process, from and to memory that it was told of."""

    def __init__(self, sources: Sequence[Side], dests: Sequence[Side]) -> None:
        self.held = [
            [(held.data_ptr(), held.data_ptr() + len(held)) for each in sides
             for held in oracle.memory(each)]
            for sides in (sources, dests)
        ]  # fmt: skip
        self.outside = self.copied = 0

    def copy(self, src: int, dst: int, length: int) -> None:
        for at, held in zip((src, dst), self.held):
            if not any(low <= at and at + length <= high for low, high in held):
                self.outside += length
                return
        ctypes.memmove(dst, src, length)
        self.copied += length

    def batch_transfer_sync(self, session: str, srcs: Any, dsts: Any, lengths: Any) -> int:
        """As Mooncake's transfer engine."""
        for src, dst, length in zip(srcs, dsts, lengths):
            self.copy(int(src), int(dst), int(length))
        return 0


class Agent:
    """As NIXL's."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def get_xfer_descs(self, blocks: Any, kind: str) -> Any:
        return np.asarray(blocks, dtype=np.uint64).reshape(-1, 3)

    def prep_xfer_dlist(self, peer: str, descs: Any, kind: str) -> Any:
        return descs

    def initialize_xfer(self, op: str, srcs: Any, dsts: Any, peer: str) -> Any:
        return srcs, dsts

    def make_prepped_xfer(self, op: str, srcs: Any, here: Any, dsts: Any, there: Any) -> Any:
        return srcs[np.asarray(here)], dsts[np.asarray(there)]

    def transfer(self, blocks: Any) -> str:
        srcs, dsts = blocks
        if [int(n) for n in srcs[:, 1]] != [int(n) for n in dsts[:, 1]]:
            raise Refused("NIXL: lengths of descriptors differ")
        self.memory.batch_transfer_sync("", srcs[:, 0], dsts[:, 0], srcs[:, 1])
        return "DONE"


def args_of(side: Side, layers: int, heads: int) -> Any:
    args = own_args(side, layers)
    pool = side.target
    args.engine_rank, args.gpu_id, args.kv_layout = side.rank, 0, None
    args.prefill_start_layer = pool.start_layer
    args.prefill_end_layer = getattr(pool, "end_layer", None)
    if hasattr(pool, "head_num"):
        args.kv_head_num, args.total_kv_head_num = pool.head_num, heads
    args.kv_data_mem_kinds = ["VRAM"] * len(args.kv_data_ptrs)
    return args


def manager(kind: type, side: Side, layers: int, heads: int, stages: int) -> Any:
    """A manager of prefill that was not started."""
    from sglang.srt.disaggregation.utils import is_mla_backend

    made = object.__new__(kind)
    latents = is_mla_backend(side.target)
    made.__dict__ |= {
        "kv_args": args_of(side, layers, heads),
        "is_mla_backend": latents,
        "attn_tp_size": side.ranks,
        "state_tp_size": side.ranks,
        "attn_cp_size": 1,
        "dcp_size": 1,
        "pp_size": stages,
    }
    made.is_hybrid_mla_backend = made.kv_args.is_hybrid_mla_backend
    return made


def mooncake(memory: Memory, made: Any, source: Side, dest: Side, layers: int, heads: int) -> None:
    """`transfer_worker` of one chunk, which is all of the request."""
    there = args_of(dest, layers, heads)

    def failed(*, failure_reason: str, **_: Any) -> None:
        raise Refused(failure_reason)

    made.__dict__ |= {
        "engine": memory,
        "state_strides_validated": set(),
        "request_status": {0: 3},
        "conclude_failure": failed,
        "enable_custom_mem_pool": False,
        "max_transfer_batch_indices": 0,
        "enable_deferred_decode_kv_release": False,
    }
    info = SimpleNamespace(
        mooncake_session_id=PEER,
        dst_kv_ptrs=there.kv_data_ptrs,
        dst_kv_layer_ids=there.kv_layer_ids,
        dst_state_data_ptrs=there.state_data_ptrs,
        dst_state_item_lens=there.state_item_lens,
        dst_state_dim_per_tensor=there.state_dim_per_tensor,
        dst_state_layer_ids=there.state_layer_ids,
        dst_attn_tp_size=dest.ranks,
        dst_tp_rank=dest.rank,
    )
    _, mismatch = made._validate_peer_state_layout(info)
    if mismatch is not None:
        raise Refused(mismatch)
    kinds = [kind.value for kind in made.kv_args.state_types]
    here, dests = (
        side.request.pages[: -(-side.request.tokens // side.request.page)].astype(np.int32)
        for side in (source, dest)
    )
    with ThreadPoolExecutor(2) as executor:
        if made.is_mla_backend or made.is_hybrid_mla_backend or source.ranks == dest.ranks:
            done = made.send_kvcache(
                PEER, here, there.kv_data_ptrs, dests, executor, dst_layer_ids=there.kv_layer_ids
            )
        else:
            done = made.send_kvcache_slice(
                PEER, here, there.kv_data_ptrs, dests, dest.rank, dest.ranks,
                there.kv_item_lens[0], executor, dst_layer_ids=there.kv_layer_ids,
            )  # fmt: skip
        if done:
            raise Refused(f"send_kvcache returned {done}")
        request = SimpleNamespace(
            mooncake_session_id=PEER,
            room=0,
            dst_state_indices=listed(state_indices(kinds, dest)),
        )
        if made.maybe_send_extra(request, listed(state_indices(kinds, source)), executor, info):
            raise Refused("maybe_send_extra failed")


def nixl(memory: Memory, made: Any, source: Side, dest: Side, layers: int, heads: int) -> None:
    """`transfer_worker` of one chunk, which is all of the request."""
    from sglang.srt.disaggregation.nixl.conn import KVArgsRegisterInfo, num_kv_slots

    there = args_of(dest, layers, heads)
    made.__dict__ |= {
        "agent": Agent(memory),
        "_use_strided_descs": False,
        "src_mem_kind": "VRAM",
        "prep_handles": {},
        "prep_handle_slice_src": None,
        "prep_handles_slice_dst": {},
        "_num_slots_src": num_kv_slots(made.kv_args.kv_data_lens, made.kv_args.kv_item_lens),
        "_prepared_state_plans": {},
        "_state_layout_rejections": {},
    }
    made._prepared_state_components = made._prepared_state_component_indices("UCX")
    info = KVArgsRegisterInfo(
        room="0",
        endpoint="",
        dst_port=0,
        agent_name=PEER,
        agent_metadata=b"",
        dst_kv_ptrs=there.kv_data_ptrs,
        dst_kv_mem_kinds=there.kv_data_mem_kinds,
        dst_aux_ptrs=[],
        dst_state_data_ptrs=there.state_data_ptrs,
        gpu_id=0,
        decode_tp_size=dest.ranks,
        decode_tp_rank=dest.rank,
        dst_kv_item_len=there.kv_item_lens[0],
        dst_kv_item_lens=there.kv_item_lens,
        dst_kv_layer_ids=there.kv_layer_ids,
        dst_num_slots=num_kv_slots(there.kv_data_lens, there.kv_item_lens),
        dst_state_item_lens=there.state_item_lens,
        dst_state_dim_per_tensor=there.state_dim_per_tensor,
        dst_state_layer_ids=there.state_layer_ids,
        dst_state_data_lens=there.state_data_lens,
    )
    made.decode_kv_args_table = {PEER: info}
    made._prepare_payload_xfer(info)
    made._prepare_state_xfer(info)
    here, dests = (
        side.request.pages[: -(-side.request.tokens // side.request.page)].astype(np.int32)
        for side in (source, dest)
    )
    if made.is_mla_backend or made.is_hybrid_mla_backend or source.ranks == dest.ranks:
        made.send_kvcache(PEER, here, there.kv_data_ptrs, dests, 0, dst_mem_kind="VRAM")
    else:
        made.send_kvcache_slice(PEER, here, dests)
    kinds = [kind.value for kind in made.kv_args.state_types]
    for _ in made.maybe_send_extra(
        PEER,
        listed(state_indices(kinds, source)),
        there.state_data_ptrs,
        listed(state_indices(kinds, dest)),
        0,
        dest.ranks,
        dest.rank,
        there.state_item_lens,
        there.state_dim_per_tensor,
        there.state_layer_ids,
    ):
        pass


def listed(indices: Sequence[Any]) -> list[list[int]]:
    """State indices as they are after the wire."""
    return [np.asarray(each).ravel().tolist() for each in indices]


def asked(sources: Sequence[Side], dest: Side, args: Any, stages: int) -> list[int]:
    """The ranks of prefill's tensor parallelism that send to a rank of decode: decode learns of
    prefill's ranks, and may refuse (`try_ensure_parallel_info`).
    """
    from sglang.srt.disaggregation.common import conn
    from sglang.srt.disaggregation.utils import get_pd_kv_layout, is_mla_backend

    pool = sources[0].target
    told = {
        "attn_tp_size": sources[0].ranks,
        "attn_cp_size": 1,
        "dp_size": 1,
        "pp_size": stages,
        "page_size": pool.page_size,
        "kv_cache_dtype": str(pool.dtype),
        "kv_layout": get_pd_kv_layout(pool),
        "follow_bootstrap_room": True,
    }
    here = object.__new__(conn.CommonKVManager)
    here.__dict__ |= {
        "prefill_info_table": {},
        "kv_args": args,
        "kv_cache_dtype_str": str(dest.target.dtype),
        "kv_layout": get_pd_kv_layout(dest.target),
        "dsv41_spec_layout": None,
        "is_mla_backend": is_mla_backend(dest.target),
        "is_hybrid_mla_backend": args.is_hybrid_mla_backend,
        "attn_tp_size": dest.ranks,
        "enable_all_cp_ranks_for_transfer": False,
        **dict.fromkeys(("dcp_size", "attn_cp_size", "pp_size"), 1),
        **dict.fromkeys(("attn_cp_rank", "pp_rank"), 0),
    }
    answer = SimpleNamespace(status_code=200, json=lambda: told)
    with mock.patch.object(conn.requests, "get", lambda *_, **__: answer):
        here.try_ensure_parallel_info("prefill")
    info = here.prefill_info_table["prefill"]
    # rows of latents are on every rank: the others are sent a dummy
    return [info.target_tp_rank] if here.is_mla_backend else info.target_tp_ranks


Send = Callable[[Memory, Any, Side, Side, int, int], None]


def transfer(
    name: str,
    sources: Sequence[Side],
    dests: Sequence[Side],
    *,
    layers: int = 8,
    heads: int = 4,
    missing: Sequence[str] = (),
) -> str:
    """What a backend makes of a pair: "same", "refused: ..." or "wrong: ...", by the oracle. It
    moves whole items, so what is dead in the request's own may be anything.
    """
    import importlib

    module = importlib.import_module(f"sglang.srt.disaggregation.{name}.conn")
    kind = {"mooncake": "MooncakeKVManager", "nixl": "NixlKVManager"}[name]
    send: Send = {"mooncake": mooncake, "nixl": nixl}[name]
    for seed, side in enumerate([*sources, *dests]):
        oracle.fill(side, seed)
    oracle.agree(sources)
    before = [[held.clone() for held in oracle.memory(side)] for side in dests]
    memory = Memory(sources, dests)
    said = SimpleNamespace(
        enable_unified_memory=False, enable_kv_cache_sharding=False, speculative_algorithm=None,
        device="cuda",
    )  # fmt: skip
    published = {
        each: (lambda: said)
        for each in ("get_memory", "get_parallel", "get_spec", "get_device")
        if hasattr(module, each)
    }
    stages = len({side.target.start_layer for side in sources})
    try:
        with mock.patch.multiple(module, **published):
            for dest in dests:
                ranks = asked(sources, dest, args_of(dest, layers, heads), stages)
                for source in sources:
                    if source.rank in ranks:
                        made = manager(getattr(module, kind), source, layers, heads, stages)
                        send(memory, made, source, dest, layers, heads)
    except (AttributeError, ImportError) as error:
        raise RuntimeError(f"not standalone: {error}") from error
    except Exception as error:
        part = " after it had copied some" if memory.copied else ""
        return f"refused{part}: {' '.join(str(error).split())}"
    if memory.outside:
        return f"wrong: {memory.outside} bytes are outside the tensors"
    for side, old in zip(dests, before):
        try:
            oracle.assert_handed_over(sources, side, old, missing, items_of(side, layers, heads))
        except AssertionError as error:
            return f"wrong: {str(error).splitlines()[0]}"
    return "same"


def items_of(side: Side, layers: int, heads: int) -> list[tuple[int, int]]:
    """First byte, and the one behind the last, of every item that SGLang lists for a request."""
    args = args_of(side, layers, heads)
    kinds = [kind.value for kind in args.state_types]
    lists = [(args.kv_data_ptrs, args.kv_item_lens, side.request.pages)]
    lists += zip(args.state_data_ptrs, args.state_item_lens, listed(state_indices(kinds, side)))
    return [
        (ptr + int(n) * size, ptr + int(n + 1) * size)
        for ptrs, sizes, indices in lists
        for ptr, size in zip(ptrs, sizes)
        for n in indices
    ]
