"""The seam between the NPU device and `torch_npu`: what the device calls, and nothing else of it.

`TorchNPU` calls torch_npu; `Reference` does the same in plain torch, on memory of the host. Names
and parameters are torch_npu's own. The tests check every call against the schemas that the
torch-npu package carries (docs/npu.md).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from kvpool.device import Event
from kvpool.device.cpu import CPUDevice


class Operators(Protocol):
    """Caches are written in place. Slots are flat: `item * entries + entry`."""

    memory_kind: str

    def npu_scatter_nd_update_(
        self, input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor
    ) -> None:
        """Rows `updates` `[N, D]` to rows `indices` `[N, 1]`, int64, of `input` `[S, D]`. float32,
        float16, bfloat16, int64, int8, bool.
        """

    def _npu_reshape_and_cache(
        self,
        *,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_indices: torch.Tensor,
    ) -> None:
        """Keys and values `[N, H, D]` to slots `[N]`, int32, of caches `[I, E, H, D]`. float16,
        bfloat16, int8.
        """

    def npu_scatter_pa_kv_cache(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        cache_mode: str,
    ) -> None:
        """Keys `[N, H, D]` and values `[N, H, Dv]` to slots `[N]`, int64, of caches `[I, E, H, D]`
        and `[I, E, H, Dv]` in order "Norm". As above, and float32.
        """

    def npu_gather_pa_kv_cache(
        self,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """The first entries of sequences, `seq_lens` `[B]`, int32, whose pages are `block_tables`
        `[B, P]`, int32, of caches `[I, E, H, D]` and `[I, E, H, Dv]`, one sequence after another
        into `key` `[N, H, D]` and `value` `[N, H, Dv]`. float16, bfloat16, int8.
        """

    def npu_dynamic_quant(
        self, input: torch.Tensor, *, dst_type: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """int8 `[N, D]` and float32 scales `[N]` of float16 or bfloat16 rows `[N, D]`: a scale is
        the row's largest magnitude over 127.
        """

    def zeros(self, nbytes: int) -> torch.Tensor:
        """uint8 `[nbytes]`."""

    def record(self) -> Event:
        """A mark in the current stream."""

    def wait(self, event: Event) -> None:
        """The current stream waits for the mark."""


class TorchNPU:
    """One NPU through the module `torch_npu`."""

    memory_kind = "npu"

    def __init__(self, torch_npu: Any, index: int) -> None:
        self._module, self._index = torch_npu, index

    def npu_scatter_nd_update_(
        self, input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor
    ) -> None:
        """See Operators."""
        self._module.npu_scatter_nd_update_(input, indices, updates)

    def _npu_reshape_and_cache(
        self,
        *,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_indices: torch.Tensor,
    ) -> None:
        with self._module.npu.device(self._index):  # ATB takes the current NPU's stream
            self._module._npu_reshape_and_cache(
                key=key,
                value=value,
                key_cache=key_cache,
                value_cache=value_cache,
                slot_indices=slot_indices,
            )

    def npu_scatter_pa_kv_cache(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        cache_mode: str,
    ) -> None:
        """See Operators."""
        self._module.npu_scatter_pa_kv_cache(
            key, value, key_cache, value_cache, slot_mapping, cache_mode=cache_mode
        )

    def npu_gather_pa_kv_cache(
        self,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """See Operators."""
        self._module.npu_gather_pa_kv_cache(
            key_cache, value_cache, block_tables, seq_lens, key, value
        )

    def npu_dynamic_quant(
        self, input: torch.Tensor, *, dst_type: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Operators."""
        values, scales = self._module.npu_dynamic_quant(input, dst_type=dst_type)
        return values, scales

    def zeros(self, nbytes: int) -> torch.Tensor:
        """See Operators."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=f"npu:{self._index}")

    def record(self) -> Event:
        """See Operators."""
        npu = self._module.npu
        event: Any = npu.Event()
        event.record(npu.current_stream(self._index))
        made: Event = event
        return made

    def wait(self, event: Event) -> None:
        """The host waits for an event of another device."""
        npu = self._module.npu
        if isinstance(event, npu.Event):
            npu.current_stream(self._index).wait_event(event)
        else:
            event.synchronize()


class Reference:
    """What the operators do, in plain torch on memory of the host."""

    memory_kind = "cpu"

    def __init__(self) -> None:
        self._host = CPUDevice()

    def npu_scatter_nd_update_(
        self, input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor
    ) -> None:
        """See Operators."""
        input[indices[:, 0]] = updates

    def _npu_reshape_and_cache(
        self,
        *,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_indices: torch.Tensor,
    ) -> None:
        for rows, cache in ((key, key_cache), (value, value_cache)):
            cache.view(-1, *cache.shape[2:])[slot_indices] = rows

    def npu_scatter_pa_kv_cache(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        cache_mode: str,
    ) -> None:
        """See Operators."""
        for rows, cache in ((key, key_cache), (value, value_cache)):
            cache.view(-1, *cache.shape[2:])[slot_mapping] = rows

    def npu_gather_pa_kv_cache(
        self,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """See Operators."""
        sequence = torch.repeat_interleave(torch.arange(len(seq_lens)), seq_lens)
        firsts = seq_lens.cumsum(0) - seq_lens
        position = torch.arange(len(sequence)) - firsts[sequence]
        size = key_cache.shape[1]
        slots = block_tables[sequence, position // size] * size + position % size
        for cache, rows in ((key_cache, key), (value_cache, value)):
            rows.copy_(cache.flatten(0, 1)[slots])

    def npu_dynamic_quant(
        self, input: torch.Tensor, *, dst_type: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Operators. Rows of zeros stay zeros."""
        floats = input.float()
        scales = floats.abs().amax(-1) / torch.iinfo(dst_type).max
        divisors = scales.masked_fill(scales == 0, 1.0)
        return (floats / divisors[..., None]).round().to(dst_type), scales

    def zeros(self, nbytes: int) -> torch.Tensor:
        """See Operators."""
        return self._host.allocate(nbytes)

    def record(self) -> Event:
        """See Operators."""
        return self._host.record()

    def wait(self, event: Event) -> None:
        """See Operators."""
        self._host.wait(event)
