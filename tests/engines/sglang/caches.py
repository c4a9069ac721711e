"""Radix caches with a store over SGLang's real pools, allocators and tree, without an engine."""

from __future__ import annotations

import threading
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache import common, memory_pool
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import match_kv_cache, release_kv_cache
from sglang.srt.mem_cache.rust_tree_core import adapter
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.components import mamba
from sglang.srt.sampling.sampling_params import SamplingParams

from disagg.connectors.sglang.pools import engine_layout
from disagg.connectors.sglang.states import Ranks
from disagg.connectors.sglang_store.cache import KvpoolRadixCache
from disagg.store import Store
from tests.engines.sglang import sides

CHUNK, WINDOW = 64, 40
MODEL = {"model": "m", "weights": "w"}


@contextmanager
def contexts():
    """What SGLang asks of a server's options, of which there is none."""
    said = SimpleNamespace(
        strip_thinking_cache=False,
        speculative_algorithm=None,
        disaggregation_mode="null",
        features=SimpleNamespace(enable_encoder_swa_bounded_replay=False),
        mamba=SimpleNamespace(mamba_max_states_per_path=0, enable_mamba_extra_buffer_lazy=False),
    )
    with ExitStack() as stack:
        stack.enter_context(sides.alone())
        for module in (mamba, adapter):
            for name in ("mamba_cache_chunk_size", "mamba_checkpoint_grid"):
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, lambda *_: 64))
        for module in (common, schedule_batch, mamba, adapter):
            for name in ("get_serving", "get_spec", "get_disagg", "get_exec"):
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, lambda: said))
        yield


class Group:
    """Ranks that agree on numbers, as over SGLang's process groups."""

    def __init__(self, size):
        self._both, self._said = threading.Barrier(size, timeout=20), {}

    def least(self, numbers, op):
        self._said[threading.get_ident()] = numbers.clone()
        self._both.wait()
        found = torch.stack([*self._said.values()]).amin(0)
        self._both.wait()
        self._said.pop(threading.get_ident())
        self._both.wait()
        numbers.copy_(found)


class Engine:
    """Ranks of tensor parallelism, which do the same at the same time."""

    def __init__(self, url, ranks, **options):
        self.sides = [Side(url, rank=rank, ranks=ranks, **options) for rank in range(ranks)]
        group, self._pool = Group(ranks), ThreadPoolExecutor(ranks)
        for side in self.sides:
            side.open([each.layout.layout for each in self.sides])
            side.cache._all_reduce_attn_groups = group.least

    def each(self, call):
        """What each rank answers."""
        return [*self._pool.map(call, self.sides)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for side in self.sides:
            side.store.close()
        self._pool.shutdown()


class Side:
    """One rank of an engine: pools of `kind`, and its cache over a store. Requests have `most`
    tokens.
    """

    def __init__(
        self, url, page=16, *, kind="mha", rank=0, ranks=1, core="rust", most=1024, **options
    ):
        self.page, self.kind = page, kind
        heads = 4 // ranks
        if kind == "hybrid":  # every fourth layer is attention
            linear = [layer for layer in range(8) if layer % 4 != 3]
            self.requests = memory_pool.HybridReqToTokenPool(
                size=8,
                mamba_size=12,
                mamba_spec_state_size=12,
                max_context_len=most,
                device="cpu",
                enable_memory_saver=False,
                cache_params=sides.linear_shape("gdn", ranks),
                mamba_layer_ids=linear,
                enable_mamba_extra_buffer=False,
            )
            self.pool = sides.hybrid(page, heads, ranks=ranks)
            self.pool.mamba_pool = self.requests.mamba_pool
        else:
            self.requests = memory_pool.ReqToTokenPool(8, most, "cpu", False)
        if kind == "hybrid":
            pass
        elif kind == "swa":
            self.pool = sides.swa(page, heads)
        else:
            self.pool = getattr(sides, kind)(page, heads) if kind == "mha" else sides.mla(page)
        size = sides.size(page)
        given = (size, torch.float32, "cpu", self.pool, False)
        if kind == "swa":
            self.allocator = SWATokenToKVPoolAllocator(
                size, size, page, torch.float32, "cpu", self.pool, False
            )
        elif page == 1:
            self.allocator = TokenToKVPoolAllocator(*given)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(size, page, *given[1:])
        more = {"swa": [ComponentType.SWA], "hybrid": [ComponentType.MAMBA]}
        components = [ComponentType.FULL, *more.get(kind, ())]
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.requests,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page,
            sliding_window_size=WINDOW if kind == "swa" else None,
            tree_components=tuple(components),
            tree_core_backend=core,
        )
        self.cache = KvpoolRadixCache(params)
        place = Ranks(tp_rank=rank, tp_size=ranks, total_kv_heads=4, window=WINDOW)
        self.layout = engine_layout(
            self.pool,
            place,
            state_types={"swa": ["swa"], "hybrid": ["mamba"]}.get(kind, []),
            total_layers=8 if kind == "hybrid" else 4,
            requests=self.requests,
        )
        self.place, self.url, self.options = (rank, ranks), url, options
        self.count = 0

    def open(self, layouts=None):
        """Opens its store, of an engine of these ranks."""
        own = self.layout.layout
        self.store = Store(
            self.url,
            own,
            conventions=MODEL,
            chunk_tokens=CHUNK,
            ranks=layouts or [own],
            rank=self.place[0],
            **self.options,
        )
        self.cache.open(self.store, self.layout, leads=self.place[0] == 0, stream=None)
        return self

    def __enter__(self):
        return self if self.cache.opened else self.open()

    def __exit__(self, *_):
        self.store.close()

    def tensors(self):
        """Name, tensor `[token, ...]`, and whether a window sees it."""
        if self.kind == "swa":
            for layer, (nth, slides) in self.pool.layers_mapping.items():
                inside = self.pool.swa_kv_pool if slides else self.pool.full_kv_pool
                yield f"{layer}/k", inside.k_buffer[nth], slides
                yield f"{layer}/v", inside.v_buffer[nth], slides
        elif self.kind == "hybrid":
            inside = self.pool.full_kv_pool
            for nth in range(inside.layer_num):
                yield f"{nth}/k", inside.k_buffer[nth], False
                yield f"{nth}/v", inside.v_buffer[nth], False
        elif self.kind == "mla":
            for layer, tensor in enumerate(self.pool.kv_buffer):
                yield f"{layer}/row", tensor, False
        else:
            for layer in range(self.pool.layer_num):
                yield f"{layer}/k", self.pool.k_buffer[layer], False
                yield f"{layer}/v", self.pool.v_buffer[layer], False

    def request(self, tokens, salt=None, extra=None, **more):
        """A request that has arrived."""
        self.count += 1
        req = Req(
            f"r{self.count}",
            "",
            array("q", tokens),
            SamplingParams(max_new_tokens=1),
            cache_salt=salt,
            extra_key=extra,
            vocab_size=1000,
        )
        for name, value in more.items():
            setattr(req, name, value)
        req.refresh_fill_ids()
        match_kv_cache(
            req, self.cache, req.full_untruncated_fill_ids, max_prefix_len=len(tokens) - 1
        )
        matched = req.prefix_len
        self.cache.prefetch_from_storage(
            req.cache_request_handle,
            req.last_node,
            req.full_untruncated_fill_ids[matched : len(tokens) - 1],
            matched_prefix_tokens=req.full_untruncated_fill_ids[:matched],
            extra_key=req.extra_key,
            cache_salt=req.cache_salt,
        )
        return req

    def waits(self, req, seconds=20.0):
        """Steps until a request may begin; returns how much of it the cache has."""
        until = time.monotonic() + seconds
        while not self.cache.check_prefetch_progress(req.cache_request_handle):
            assert time.monotonic() < until
            self.cache.check_hicache_events()
            time.sleep(0.001)
        return self.begins(req)

    def begins(self, req):
        length = len(req.full_untruncated_fill_ids)
        match_kv_cache(
            req,
            self.cache,
            req.full_untruncated_fill_ids,
            max_prefix_len=length - 1,
            cow_mamba=self.kind == "hybrid",
        )
        req.kv.cache_protected_len = req.prefix_len
        return req.prefix_len

    def alloc(self, start, stop):
        """Slots as a forward pass of SGLang gets them."""
        if self.page == 1:
            return self.allocator.alloc(stop - start)
        assert start % self.page == 0
        pages = -(-stop // self.page) - start // self.page
        if self.kind == "swa":
            found = self.allocator.full_attn_allocator.alloc(pages * self.page)
            window = self.allocator.swa_attn_allocator.alloc(pages * self.page)
            self.allocator.set_full_to_swa_mapping(found, window)
        else:
            found = self.allocator.alloc(pages * self.page)
        return found[: stop - start]

    def computes(self, req, stop=None):
        """The forward pass of a request's tokens from its prefix on."""
        start, stop = req.prefix_len, stop or len(req.full_untruncated_fill_ids)
        if not req.kv.holds_kv:
            self.requests.alloc([req])
            req.lock = self.cache.lock(req.last_node)
            row = self.cache.prefix_device_indices(req)
            self.requests.write((req.kv.req_pool_idx, slice(0, start)), row.to(torch.int32))
        slots = self.alloc(start, stop)
        self.requests.write((req.kv.req_pool_idx, slice(start, stop)), slots.to(torch.int32))
        req.kv.kv_allocated_len = req.kv.kv_committed_len = stop
        self.fill(slots.to(torch.int64), range(start, stop))
        if self.kind == "hybrid":
            req.kv.mamba_cow_src_index = None
            for tensor in self.states():
                tensor[:, req.kv.mamba_pool_idx] = self.state(tensor, stop)
        req.prefix_len = stop
        self.cache.checkpoint(req, up_to=stop)

    def fill(self, slots, positions):
        """Values that say layer, role, head and position."""
        where = torch.tensor([*positions])
        for number, (name, tensor, slides) in enumerate(self.tensors()):
            at = self.allocator.translate_loc_from_full_to_swa(slots) if slides else slots
            shape = tensor[at].shape
            head = torch.zeros(1)
            if tensor.dim() == 3 and not name.endswith("row"):
                head = torch.arange(shape[1]) + self.place[0] * shape[1]
            value = (where[:, None] * 31 + head[None] * 7 + number * 3) % 120 / 8
            tensor[at] = value.reshape(len(where), -1, *[1] * (tensor.dim() - 2)).to(tensor.dtype)

    def states(self):
        """Tensors `[layer, slot, ...]`, of which ranks share the first dim of a slot."""
        cache = self.requests.mamba_pool.mamba_cache
        return [cache.conv[0], cache.temporal]

    def state(self, tensor, tokens):
        """The state after so many tokens, on all ranks the same."""
        layers = torch.arange(tensor.shape[0]) * 3 + tokens % 97
        return layers.reshape(-1, *[1] * (tensor.dim() - 2)).to(tensor.dtype) / 4

    def ends(self, req):
        req.finished_reason = schedule_batch.FINISH_LENGTH(1)
        release_kv_cache(req, self.cache, checkpoint=True)
        self.written()

    def written(self):
        until = time.monotonic() + 20
        while self.store.stats().queued_bytes:
            assert time.monotonic() < until
            time.sleep(0.001)

    def serves(self, tokens, **more):
        """A whole request; returns how much of it was not computed."""
        req = self.request(tokens, **more)
        cached = self.waits(req)
        self.computes(req)
        self.ends(req)
        return cached

    def holds(self, req):
        """Whether the pool has what the oracle says of a request's prefix, by SGLang's indices."""
        slots = self.cache.prefix_device_indices(req).to(torch.int64)
        count = len(slots)
        at = {False: slots, True: None}
        first = {False: 0, True: max(0, count - WINDOW)}
        kept = [(n, t.clone()) for n, t, _ in self.tensors()]
        if self.kind == "swa":
            at[True] = self.allocator.translate_loc_from_full_to_swa(slots)
            assert (at[True][first[True] :] > 0).all()
        self.fill(slots, range(count))
        if self.kind == "hybrid" and count:
            slot = req.kv.mamba_cow_src_index
            for tensor in self.states():
                found = tensor[:, slot[0]]
                assert torch.equal(found, self.state(tensor, count).expand_as(found))
        return all(
            torch.equal(before[at[slides]][first[slides] :], now[at[slides]][first[slides] :])
            for (_, before), (_, now, slides) in zip(kept, self.tensors())
        )

    def whole(self):
        """Whether all slots are free, or the tree's to give away."""
        cache, allocator = self.cache, self.allocator
        assert not cache.has_pending_cache_operations()
        assert cache.protected_size() == 0
        if self.kind == "swa":
            full, swa = allocator.full_available_size(), allocator.swa_available_size()
            assert full + cache.full_evictable_size() == allocator.size_full
            assert swa + cache.swa_evictable_size() == allocator.size_swa
        else:
            if self.kind == "hybrid":
                slots = self.requests.mamba_allocator
                assert slots.available_size() + cache.mamba_evictable_size() == slots.size
                assert cache.mamba_protected_size() == 0
            found = allocator.available_size(), cache.full_evictable_size()
            assert sum(found) == allocator.size, found
        cache.sanity_check()
        return True
