"""What the NPU device uses of `torch_npu`: its operators, and one NPU's memory and streams.

The tests check every call of an operator against the schemas in the torch-npu package
(docs/npu.md).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from kvpool.device import Event
from kvpool.device.cpu import CPUDevice


class Operators:
    """The operators in plain torch, with torch_npu's names and parameters, so that the module
    `torch_npu` can take the place of this class. Caches are written in place. Slots are flat:
    `item * entries + entry`.
    """

    @staticmethod
    def npu_scatter_nd_update_(
        input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor
    ) -> None:
        """Writes rows `updates` `[N, D]` to rows `indices` `[N, 1]`, int64, of `input` `[S, D]`.
        float32, float16, bfloat16, int64, int8, bool.
        """
        input[indices[:, 0]] = updates

    @staticmethod
    def _npu_reshape_and_cache(
        *,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_indices: torch.Tensor,
    ) -> None:
        """Writes keys and values `[N, H, D]` to slots `[N]`, int32, of caches `[I, E, H, D]`.
        float16, bfloat16, int8.
        """
        for rows, cache in ((key, key_cache), (value, value_cache)):
            cache.view(-1, *cache.shape[2:])[slot_indices] = rows

    @staticmethod
    def npu_scatter_pa_kv_cache(
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        cache_mode: str,
    ) -> None:
        """Writes keys `[N, H, D]` and values `[N, H, Dv]` to slots `[N]`, int64, of caches
        `[I, E, H, D]` and `[I, E, H, Dv]` with `cache_mode` "Norm". As above, and float32.
        """
        for rows, cache in ((key, key_cache), (value, value_cache)):
            cache.view(-1, *cache.shape[2:])[slot_mapping] = rows

    @staticmethod
    def npu_gather_pa_kv_cache(
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Reads the first `seq_lens` `[B]` entries of sequences with pages `block_tables` `[B, P]`,
        both int32, from caches `[I, E, H, D]` and `[I, E, H, Dv]` into `key` `[N, H, D]` and
        `value` `[N, H, Dv]`, one sequence after another. float16, bfloat16, int8.
        """
        sequence = torch.repeat_interleave(torch.arange(len(seq_lens)), seq_lens)
        firsts = seq_lens.cumsum(0) - seq_lens
        position = torch.arange(len(sequence)) - firsts[sequence]
        size = key_cache.shape[1]
        slots = block_tables[sequence, position // size] * size + position % size
        for cache, rows in ((key_cache, key), (value_cache, value)):
            rows.copy_(cache.flatten(0, 1)[slots])

    @staticmethod
    def npu_dynamic_quant(
        input: torch.Tensor, *, dst_type: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """int8 `[N, D]` and float32 scales `[N]` of float16 or bfloat16 rows `[N, D]`. A scale is
        the row's largest magnitude over 127.
        """
        floats = input.float()
        scales = floats.abs().amax(-1) / torch.iinfo(dst_type).max
        divisors = scales.masked_fill(scales == 0, 1.0)
        return (floats / divisors[..., None]).round().to(dst_type), scales


class TorchNPU:
    """One NPU through the module `torch_npu`."""

    memory_kind = "npu"

    def __init__(self, torch_npu: Any, index: int) -> None:
        self.operators: Operators = torch_npu
        self._npu, self._index = torch_npu.npu, index

    def zeros(self, nbytes: int) -> torch.Tensor:
        """A zeroed uint8 tensor `[nbytes]`."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=f"npu:{self._index}")

    def current(self) -> AbstractContextManager[Any]:
        """Makes this NPU the current one."""
        context: AbstractContextManager[Any] = self._npu.device(self._index)
        return context

    def record(self) -> Event:
        """An event in the current stream."""
        event: Any = self._npu.Event()
        event.record(self._npu.current_stream(self._index))
        recorded: Event = event
        return recorded

    def wait(self, event: Event) -> None:
        """The current stream waits for an NPU's event; the host waits for any other event."""
        if isinstance(event, self._npu.Event):
            self._npu.current_stream(self._index).wait_event(event)
        else:
            event.synchronize()


class Reference:
    """The operators in plain torch, on host memory."""

    memory_kind = "cpu"

    def __init__(self) -> None:
        self.operators = Operators()
        self._host = CPUDevice()
        self.zeros, self.record, self.wait = self._host.allocate, self._host.record, self._host.wait

    def current(self) -> AbstractContextManager[Any]:
        """There is only one device."""
        return nullcontext()
