"""Saves what vLLM's own tensors hold of a request: prefill's when it is computed, decode's when it
has arrived.

vLLM loads this file by itself, as a plugin (`vllm.general_plugins`), so it imports nothing of the
packages under test. Positions are looked up in vLLM's views by the arithmetic of its slot mapping:
block `ids[position // block_size]`, row `position % block_size`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

FOLDER, SIDE = os.environ.get("KVPOOL_CONFORM", ""), os.environ.get("KVPOOL_CONFORM_SIDE", "")
DRAFTS = ("draft_model.", "mtp.")
"""Beginnings of the names of a draft's layers."""
SEEN = "initialize_kv_cache_tensors", "execute_model", "_model_forward", "sample_tokens"
"""Of a model runner: another one is not read."""
REQUEST = re.compile(r"conform-\d+")


def _delta(config: Any) -> dict[str, int]:
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    return {"q": keys, "k": keys, "v": values}


def _mamba2(config: Any) -> dict[str, int]:
    groups = config.mamba_n_groups * config.mamba_d_state
    return {"x": config.mamba_d_ssm, "b": groups, "c": groups}


CONV: dict[str, Callable[[Any], dict[str, int]]] = {
    "qwen3_next": _delta,
    "qwen3_5": _delta,
    "qwen3_5_text": _delta,
    "qwen3_5_moe": _delta,
    "qwen3_5_moe_text": _delta,
    "falcon_h1": _mamba2,
    "lfm2": lambda config: {"x": config.hidden_size},
    "lfm2_moe": lambda config: {"x": config.hidden_size},
}
"""Channels of a convolution's sections, by the model's type. Ranks share each section."""


def register() -> None:
    """Called by vLLM in each of its processes."""
    if SIDE == "single":
        _split_prompts()
    if os.environ.get("KVPOOL_CONFORM_CPU"):
        # MooncakeConnector asks for the number of a device, where there is none
        torch.accelerator.current_device_index = lambda: 0
    if FOLDER and SIDE in ("prefill", "decode"):
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        original = WorkerWrapperBase.initialize_from_config

        def initialize(wrapper: Any, configs: Any) -> None:
            runner = wrapper.worker.model_runner
            watch = _RunnerWatch(runner) if all(hasattr(runner, name) for name in SEEN) else None
            original(wrapper, configs)
            if watch is not None:
                watch.begin()

        WorkerWrapperBase.initialize_from_config = initialize


def _split_prompts() -> None:
    """A prompt's last token is computed in a step of its own, as where decode takes over: sums of
    bfloat16 over one step are rounded otherwise than over two. Prompts are asked one by one.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler.schedule

    def schedule(scheduler: Any, *args: Any, **more: Any) -> Any:
        budget = scheduler.max_num_scheduled_tokens
        for request in (*scheduler.waiting, *scheduler.running):
            left = request.num_prompt_tokens - 1 - request.num_computed_tokens
            if left > 0:
                scheduler.max_num_scheduled_tokens = min(budget, left)
        try:
            return original(scheduler, *args, **more)
        finally:
            scheduler.max_num_scheduled_tokens = budget

    Scheduler.schedule = schedule


class _RunnerWatch:
    """Of one worker: sees its runner's steps.

    A decode's state is read around the first step of a request: recurrent state before it, as the
    step changes it, the others behind it, as a connector may load by layer. A prefill's is read
    behind the step that ends the prompt, with what the drafter has written then; recurrent state
    behind each step, as it is handed over at another position than attention's.
    """

    def __init__(self, runner: Any) -> None:
        self.runner, self.views = runner, dict[str, Any]()
        self.steps: dict[str, tuple[int, int]] = {}
        """By request, tokens before and behind the step."""
        self.new: set[str] = set()
        make = runner.initialize_kv_cache_tensors

        def noted(*args: Any, **more: Any) -> Any:
            self.views = make(*args, **more)
            return self.views

        runner.initialize_kv_cache_tensors = noted

    def begin(self) -> None:
        runner = self.runner
        execute, forward, sample = (
            runner.execute_model,
            runner._model_forward,
            runner.sample_tokens,
        )

        def executed(output: Any, *args: Any, **more: Any) -> Any:
            self.note(output)
            return execute(output, *args, **more)

        def computed(*args: Any, **more: Any) -> Any:
            self.save_received("states")
            result = forward(*args, **more)
            self.save_received("rows")
            return result

        def sampled(*args: Any, **more: Any) -> Any:
            result = sample(*args, **more)
            self.save_computed()
            return result

        runner.execute_model, runner._model_forward = executed, computed
        runner.sample_tokens = sampled
        Path(FOLDER, f"{SIDE}.watched").touch()

    def note(self, output: Any) -> None:
        cached = output.scheduled_cached_reqs
        before = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        self.new = set(before)
        before |= dict(zip(cached.req_ids, cached.num_computed_tokens))
        self.steps = {
            name: (before[name], before[name] + count)
            for name, count in output.num_scheduled_tokens.items()
            if REQUEST.search(name)
        }

    def save_received(self, kind: str) -> None:
        for name in self.new & self.steps.keys() if SIDE == "decode" else ():
            tokens, _ = self.steps[name]
            if tokens:
                self.save(name, tokens, kind)

    def save_computed(self) -> None:
        steps, self.steps = self.steps, {}
        for name, (before, tokens) in steps.items() if SIDE == "prefill" else ():
            prompt = self.runner.requests[name].num_prompt_tokens
            if before < prompt:
                self.save(name, tokens, "states")
            if before < prompt <= tokens:
                self.save(name, prompt, "rows")

    def save(self, name: str, tokens: int, kind: str) -> None:
        """Writes `{side}.{request}.{stage}.{rank}.{tokens}.{kind}.npz`: attention's `rows`, or
        recurrent `states`.
        """
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        blocks = self.runner.requests[name].block_ids
        arrays: dict[str, Any] = {}
        facts: dict[str, Any] = {}
        unread: list[str] = []
        for group, ids in zip(self.runner.kv_cache_config.kv_cache_groups, blocks):
            for layer in group.layer_names:
                specs = getattr(group.kv_cache_spec, "kv_cache_specs", {})
                spec = specs.get(layer, group.kv_cache_spec)
                states = type(spec).__name__ == "MambaSpec"
                if layer not in self.views or states != (kind == "states"):
                    continue
                try:
                    for part in (self.states if states else self.rows)(layer, spec, ids, tokens):
                        tensor = part.pop("tensor")
                        facts[part["key"]] = {**part, "dtype": str(tensor.dtype)[6:]}
                        arrays[part["key"]] = _bytes(tensor)
                except Exception as problem:  # no engine ends because it cannot be read
                    unread.append(f"{layer}: {type(problem).__name__}: {problem}")
        if not (arrays or unread):
            return
        match = REQUEST.search(name)
        assert match
        tp, pp = get_tp_group().rank_in_group, get_pp_group().rank_in_group
        told = {"tokens": tokens, "parts": facts, "unread": unread}
        place = Path(FOLDER) / f"{SIDE}.{match[0]}.{pp}.{tp}.{tokens}.{kind}.npz"
        with place.with_suffix(".new").open("wb") as file:
            np.savez(file, told=np.frombuffer(json.dumps(told).encode(), np.uint8), **arrays)
        place.with_suffix(".new").rename(place)

    def rows(self, layer: str, spec: Any, ids: Any, tokens: int) -> Iterator[dict[str, Any]]:
        """K and V `[position, head, dim]`, or a row `[position, 1, row]`, of live positions."""
        view, size, start = self.views[layer], spec.block_size, 0
        if window := getattr(spec, "sliding_window", None):
            # prefill's next position is decode's, or one behind
            start = max(0, tokens - (window if SIDE == "prefill" else window - 1))
        blocks = torch.tensor(list(ids))
        positions = torch.arange(start, tokens)
        positions = positions[
            blocks[positions // size] != 0
        ]  # vLLM's null block stands for what is freed
        block, step = blocks[positions // size], positions % size
        first = int(positions[0]) if len(positions) else tokens
        named = {**self.name(layer), "start": first}
        if view.ndim != 4 or view.shape[2] != size:
            raise Unreadable(f"a view {tuple(view.shape)} for blocks of {size}")
        if "MLA" in type(spec).__name__:
            yield _part(named, "row", view[block, 0, step][:, None], "same")
            return
        if self.backend(layer) != "CPU_ATTN":
            rows = view[block, :, step]
            dims = {"k": spec.head_size, "v": rows.shape[-1] - spec.head_size}
            for part, tensor in zip(dims, rows.split(list(dims.values()), -1)):
                yield _part(named, part, tensor, "heads")
            return
        _, heads, _, content = view.shape
        module = self.runner.compilation_config.static_forward_context[layer]
        if getattr(module, "isa", "") not in ("vec", "vec16"):
            raise Unreadable(f"blocks of CPU attention's isa {getattr(module, 'isa', 'unknown')}")
        # a plane of K [dim, token], then a plane of V [token, dim]
        dim = content // 2
        planes = view.reshape(view.shape[0], heads, 2, size * dim)
        keys = planes[:, :, 0].reshape(-1, heads, dim, size)
        values = planes[:, :, 1].reshape(-1, heads, size, dim)
        yield _part(named, "k", keys[block, :, :, step], "heads")
        yield _part(named, "v", values[block, :, step], "heads")

    def states(self, layer: str, spec: Any, ids: Any, tokens: int) -> Iterator[dict[str, Any]]:
        """Sections of the conv state `[tap, channel, 1]`, and temporal states `[1, head, ...]`."""
        live = ids[len(ids) - 1 - spec.num_speculative_blocks]
        page = self.views[layer][live].contiguous().view(torch.uint8).reshape(-1)
        states = []
        for shape, dtype in zip(spec.shapes, spec.dtypes):
            nbytes = prod(shape) * dtype.itemsize
            states.append(page[:nbytes].view(dtype).view(shape))
            page = page[nbytes:]
        named = {**self.name(layer), "start": tokens}
        config = self.runner.vllm_config.model_config.hf_text_config
        ranks = self.runner.vllm_config.parallel_config.tensor_parallel_size
        if config.model_type not in CONV:
            raise Unreadable(f"channels of {config.model_type}'s convolutions")
        sections = {part: count // ranks for part, count in CONV[config.model_type](config).items()}
        conv, *temporal = states
        if conv.shape[1] != sum(sections.values()):
            conv = conv.T
        taps = conv[: len(conv) - self.runner.vllm_config.num_speculative_tokens]
        for part, section in zip(sections, taps.split(list(sections.values()), 1)):
            yield _part(named, f"conv.{part}", section[..., None], "heads")
        for number, state in enumerate(temporal):
            yield _part(named, f"temporal.{number}", state[None], "heads")

    def name(self, layer: str) -> dict[str, Any]:
        """Whose layer it is, and its number. Layers of EAGLE and MTP follow the target's."""
        number = int(next(word for word in layer.split(".") if word.isdecimal()))
        target = number < self.runner.vllm_config.model_config.hf_text_config.num_hidden_layers
        owner = "target" if target and not layer.startswith(DRAFTS) else "draft"
        return {"owner": owner, "layer": number}

    def backend(self, layer: str) -> str:
        """The name of a layer's attention backend."""
        groups = [group for layer_groups in self.runner.attn_groups for group in layer_groups]
        groups += getattr(getattr(self.runner, "drafter", None), "draft_attn_groups", [])
        return next((g.backend.get_name() for g in groups if layer in g.layer_names), "CPU_ATTN")


class Unreadable(Exception):
    """A layer whose bytes this file has no form for."""


def _part(named: dict[str, Any], part: str, tensor: torch.Tensor, join: str) -> dict[str, Any]:
    """`join`: ranks hold `heads` of axis 1, or the `same`."""
    key = f"{named['owner']} {named['layer']} {part}"
    return {**named, "key": key, "part": part, "join": join, "tensor": tensor}


def _bytes(tensor: torch.Tensor) -> Any:
    """`[position, head, byte]`."""
    flat = tensor.reshape(*tensor.shape[:2], -1).contiguous()
    return flat.view(torch.uint8).numpy()
