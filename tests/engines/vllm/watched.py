"""The connector, and beside it an oracle that saves what vLLM's own tensors hold of each room.

Tests only. It does not use layouts: positions are looked up in vLLM's views by plain indexing, as
the attention kernels do (`vec`, `vec16`: K `[dim, token]`, then V `[token, dim]`, per head).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from time import sleep
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.parallel_state import get_world_group
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from disagg.connectors.steps import ReceiveTask, SendTask
from disagg.connectors.store.steps import StoreRead, StoreWrite
from disagg.connectors.store.worker import StoreResults, StoreWorker
from disagg.connectors.vllm.connector import KvpoolConnector
from disagg.store import store as stores
from tests.engines.pair import saved
from tests.engines.vllm import deepseek_v4

CONV: dict[str, Callable[[Any], dict[str, int]]] = {
    "qwen3_next": lambda config: {
        "q": config.linear_num_key_heads * config.linear_key_head_dim,
        "k": config.linear_num_key_heads * config.linear_key_head_dim,
        "v": config.linear_num_value_heads * config.linear_value_head_dim,
    },
    "falcon_h1": lambda config: {
        "x": config.mamba_d_ssm,
        "b": config.mamba_n_groups * config.mamba_d_state,
        "c": config.mamba_n_groups * config.mamba_d_state,
    },
    "lfm2": lambda config: {"x": config.hidden_size},
}
"""Channels of a convolution's sections, by the model's type. Ranks share each section."""
WATCH, SIDE = os.environ.get("KVPOOL_WATCH", ""), os.environ.get("KVPOOL_SIDE", "")
NOISE = bool(os.environ.get("KVPOOL_NOISE"))


class HeldFloor:
    """A floor whose calls hang while the watched folder has `hold NAME`."""

    def __init__(self, floor: Any) -> None:
        self._floor = floor

    def __getattr__(self, name: str) -> Any:
        call, hold = getattr(self._floor, name), Path(WATCH) / f"hold {name}"

        def held(*given: Any) -> Any:
            while hold.exists():
                sleep(0.02)
            return call(*given)

        return held


_open_floor = stores.open_floor
stores.open_floor = lambda url: HeldFloor(_open_floor(url))  # type: ignore[assignment, return-value]


class WatchedConnector(KvpoolConnector):
    """Saves `{side}.{room}.{rank}.pt`: state by (layer, part), positions first. What is written to
    a store is prefill's, what is read decode's, and the room is the key of the last chunk.
    """

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self._views = kv_caches
        if self._kv_cache_config.needs_kv_cache_zeroing:
            # nothing may be computed from a block that neither vLLM nor the connector has written
            for view in kv_caches.values():
                view.view(torch.uint8).fill_(255)
        config = self._vllm_config
        self._v4 = config.model_config.hf_config.model_type == "deepseek_v4"
        if self._v4:  # of ranks that vLLM has spawned
            deepseek_v4.enable()
        self._modules = get_layers_from_vllm_config(config, AttentionLayerBase)
        worker, asked = self._worker, {}
        send, receive, received = worker._send, worker._receive, worker.rank._received

        def saw_send(told: SendTask, layer: Any) -> None:
            send(told, layer)
            if told.last and not worker._left:  # its last part
                self._save("prefill", told.room, told.blocks, told.stop)

        def saw_receive(told: ReceiveTask) -> None:
            asked[told.source.room] = told
            receive(told)

        def saw_received(room: str | int, failure: Any) -> None:
            if failure is None and room in asked:
                told = asked[room]
                if NOISE:
                    self._roll(told.blocks)
                self._save("decode", room, told.blocks, told.stop)
            received(room, failure)

        worker._send, worker._receive, worker.rank._received = saw_send, saw_receive, saw_received
        if worker.store is not None:
            self._watch(worker.store)

    def _watch(self, store: StoreWorker) -> None:
        write, read, results = store._write, store._read, store.results
        asked: dict[str, StoreRead] = {}
        keys: set[bytes] = set()
        chunk = self._settings.chunk_tokens

        def saw_write(told: StoreWrite) -> None:
            write(told)
            for number, key in enumerate(told.keys, told.first + 1):
                tokens = number * chunk
                blocks = self._stored(told, tokens)
                # what was read may have to be written too, where vLLM has kept it; and what was
                # written may be again, by a request that has no window there any more: an object
                # is created once
                if blocks is not None and key not in keys:
                    keys.add(key)
                    self._save("prefill", key.hex(), blocks, tokens)

        def saw_read(told: StoreRead) -> None:
            asked[told.request] = told
            keys.update(told.keys)
            read(told)

        def saw_results() -> StoreResults:
            ended = results()
            for name in ended.received - ended.failed:
                told = asked[name]
                if NOISE:
                    self._roll(told.blocks)
                self._save("decode", told.keys[-1].hex(), told.blocks, told.stop)
            return ended

        store._write, store._read, store.results = saw_write, saw_read, saw_results

    def _stored(self, told: StoreWrite, tokens: int) -> Any:
        """The blocks of a request at a chunk's end; None if its recurrent state is not there."""
        blocks = list(told.blocks)
        for number, group in enumerate(self._kv_cache_config.transfer_groups):
            spec = group.kv_cache_spec
            if type(spec).__name__ == "MambaSpec":
                state = told.states.get(tokens, {}).get(number)
                if state is None and told.computed != tokens:
                    return None
                last = (tokens - 1) // spec.block_size
                blocks[number] = [*blocks[number][:last], state or blocks[number][last]]
        return blocks

    def _save(self, side: str, room: str | int, blocks: Any, tokens: int) -> None:
        groups = self._kv_cache_config.transfer_groups
        found: dict[str, torch.Tensor] = {}
        for group, ids in zip(groups, blocks):
            for name in group.layer_names:
                spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(
                    name, group.kv_cache_spec
                )
                self._one(found, name, spec, torch.tensor(list(ids)), tokens)
        rank = get_world_group().rank
        name = str(room).replace("/", "_")
        saved(found, Path(WATCH), f"{side}.{name}.{rank}")

    def _one(self, found: Any, name: str, spec: Any, ids: torch.Tensor, tokens: int) -> None:
        view, kind = self._views[name], type(spec).__name__
        if kind == "MambaSpec":
            live = ids[len(ids) - 1 - spec.num_speculative_blocks]
            page = view[live].contiguous().view(torch.uint8).reshape(-1)
            found.update({f"{name}/{part}": each for part, each in self._states(spec, page)})
            return
        if self._v4:
            rows = deepseek_v4.live_rows(view, spec, name, ids, tokens)
            if len(rows):
                found[f"{name}/{name.rpartition('attn')[2]} row"] = rows
            return
        size, window = spec.block_size, None
        if kind.startswith("SlidingWindow"):
            window = spec.sliding_window - 1
        at = torch.arange(0 if window is None else max(0, tokens - window), tokens)
        block, step = ids[at // size], at % size
        if "MLA" in kind:
            found[f"{name}/row"] = view[block, 0, step].clone()
            return
        _, heads, _, content = view.shape
        dim = content // 2
        planes = view.view(view.shape[0], heads, 2, size * dim)
        keys = planes[:, :, 0].view(-1, heads, dim, size)
        values = planes[:, :, 1].view(-1, heads, size, dim)
        found[f"{name}/k"] = keys[block, :, :, step].clone()  # [position, head, dim]
        found[f"{name}/v"] = values[block, :, step].clone()

    def _states(self, spec: Any, page: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's sections of the conv state `[tap, channel]`, by the numbers of the model's
        configuration, and the temporal state `[1, head, ...]`.
        """
        states = []
        for shape, dtype in zip(spec.shapes, spec.dtypes):
            nbytes = prod(shape) * dtype.itemsize
            states.append(page[:nbytes].view(dtype).view(shape).clone())
            page = page[nbytes:]
        config = self._vllm_config.model_config.hf_text_config
        ranks = self._vllm_config.parallel_config.tensor_parallel_size
        conv, *temporal = states
        taps = conv[: len(conv) - self._vllm_config.num_speculative_tokens]
        channels = [
            (part, count // ranks) for part, count in CONV[config.model_type](config).items()
        ]
        assert sum(count for _, count in channels) == conv.shape[1]
        sections = taps.split([count for _, count in channels], 1)
        for (part, _), section in zip(channels, sections):
            yield f"conv.{part}", section
        for state in temporal:
            yield "temporal", state[None]

    def _roll(self, blocks: Any) -> None:
        """Noise: what was received, moved by one element."""
        for group, ids in zip(self._kv_cache_config.transfer_groups, blocks):
            live = [block for block in ids if block]
            for name in group.layer_names:
                view = self._views[name]
                for part in view if isinstance(view, (list, tuple)) else [view]:
                    part[live] = part[live].roll(1, -1)
