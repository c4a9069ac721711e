"""The Ascend device: torch_npu's operators where they take a view, torch's indexing elsewhere.

Operators that write a cache take it contiguous, as pools with a tensor per role have it. Rows that
lie apart (latent and rope in one row, heads before entries, sections of a convolution) are indexed,
which is right everywhere and slower on an NPU.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Sequence

import torch

from kvpool import torch_ops
from kvpool.device import Mark
from kvpool.grid import Ints
from kvpool.quant import dequantise, quantise
from kvpool.torch_ops import Row, bits
from kvpool_npu.missing import missing
from kvpool_npu.operators import Operators, Reference, TorchNPU

# what npu_scatter_nd_update_ takes, and what stands for other dtypes of their size: no operator
# used here looks into what it moves
TAKEN = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool)
STAND_IN = {1: torch.int8, 2: torch.float16, 4: torch.float32, 8: torch.int64}
PAIRED = (torch.float16, torch.bfloat16, torch.int8)
UNEQUAL = (*PAIRED, torch.float32)
BLOCK = 32  # bytes: what ATB's operators want rows to be multiples of
MAX_SLOT = (1 << 31) - 1


class NPUDevice:
    """One NPU, or with `operators` whatever these work on.

    Its `copy_runs` takes addresses in memory that it allocated, and launches a copy for each run.
    """

    alignment = 2 << 20
    registration_limit = 256

    def __init__(self, name: str = "npu:0", operators: Operators | None = None) -> None:
        self.name, self._operators = name, operators
        self.memory_kind = "npu" if operators is None else operators.memory_kind
        self._slabs: list[weakref.ref[torch.Tensor]] = []

    def availability(self) -> str | None:
        """All that is missing, where torch_npu would have to be imported to work."""
        return missing(self.name) if self._operators is None else None

    @property
    def operators(self) -> Operators:
        """What all work goes through; asking for it imports torch_npu."""
        if self._operators is None:
            index = int(self.name.partition(":")[2] or 0)
            self._operators = TorchNPU(importlib.import_module("torch_npu"), index)
        return self._operators

    def allocate(self, nbytes: int, alignment: int | None = None) -> torch.Tensor:
        """See Device.allocate; up to one alignment of memory lies unused before it."""
        step = alignment or self.alignment
        wider = self.operators.zeros(nbytes + step)
        slab = wider[-wider.data_ptr() % step :][:nbytes]
        self._slabs = [*(known for known in self._slabs if known() is not None), weakref.ref(slab)]
        return slab

    def store(self, view: torch.Tensor, locations: torch.Tensor, values: torch.Tensor) -> None:
        """See Device.store."""
        if not locations.numel():
            return
        flat = _flat(view)
        if flat is None:
            torch_ops.store(view, locations, values)
        elif flat.is_contiguous():
            self.operators.npu_scatter_nd_update_(
                _taken(flat.flatten(1)), locations[:, None], _taken(values.flatten(1))
            )
        else:
            bits(flat)[locations] = bits(values)

    def load(self, view: torch.Tensor, locations: torch.Tensor) -> torch.Tensor:
        """See Device.load."""
        flat = _flat(view)
        if flat is None:
            return torch_ops.load(view, locations)
        return _taken(flat).index_select(0, locations).view(view.dtype)

    def quantize_store(
        self,
        view: torch.Tensor,
        scales: torch.Tensor,
        locations: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """See Device.quantize_store. e4m3 needs an NPU that has it (A5)."""
        self.store_rows([Row(view, values, scales)], locations)

    def dequantize_load(
        self,
        view: torch.Tensor,
        scales: torch.Tensor,
        locations: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """See Device.dequantize_load."""
        return dequantise(self.load(view, locations), self.load(scales, locations), dtype)

    def store_rows(self, rows: Sequence[Row], locations: torch.Tensor) -> None:
        """See Device.store_rows. Two caches of equal pages and heads, K and V, are one launch."""
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        for view, values, scales in rows:
            if scales is None:
                parts.append((view, values))
            else:
                held, factors = quantise(values, scales.shape[-1], scales.dtype)
                parts += (view, held), (scales, factors)
        first: dict[object, tuple[torch.Tensor, torch.Tensor]] = {}
        for view, values in parts:
            kind = (view.dtype, view.shape[:3])
            if view.dim() != 4 or not view.is_contiguous():
                self.store(view, locations, values)
            elif kind in first:
                self._store_pair(*first.pop(kind), view, values, locations)
            else:
                first[kind] = view, values
        for view, values in first.values():
            self.store(view, locations, values)

    def copy_items(
        self,
        views: Sequence[torch.Tensor],
        src: torch.Tensor,
        dst: torch.Tensor,
        disjoint: bool = False,
    ) -> None:
        """See Device.copy_items."""
        for view in views:
            self.store(view[:, None], dst, view.index_select(0, src))

    def copy_runs(self, src: Ints, dst: Ints, nbytes: Ints) -> None:
        """See Device.copy_runs. Raises ValueError for a run outside what this device allocated."""
        held = [slab for known in self._slabs if (slab := known()) is not None]
        for start, to, size in zip(src.tolist(), dst.tolist(), nbytes.tolist()):
            _at(held, to, size).copy_(_at(held, start, size))

    def record(self) -> Mark:
        """See Device.record."""
        return self.operators.record()

    def wait(self, mark: Mark) -> None:
        """See Device.wait."""
        self.operators.wait(mark)

    def _store_pair(
        self,
        key_cache: torch.Tensor,
        key: torch.Tensor,
        value_cache: torch.Tensor,
        value: torch.Tensor,
        locations: torch.Tensor,
    ) -> None:
        caches = _taken(key_cache), _taken(value_cache)
        given = _taken(key).contiguous(), _taken(value).contiguous()
        dtype, row = caches[0].dtype, caches[0][0, 0]
        if not locations.numel():
            return
        if (
            dtype in PAIRED
            and key_cache.shape == value_cache.shape
            and row.numel() * row.element_size() % BLOCK == 0
            and key_cache.shape[0] * key_cache.shape[1] <= MAX_SLOT
        ):
            self.operators._npu_reshape_and_cache(
                key=given[0],
                value=given[1],
                key_cache=caches[0],
                value_cache=caches[1],
                slot_indices=locations.to(torch.int32),
            )
        elif dtype in UNEQUAL:
            self.operators.npu_scatter_pa_kv_cache(*given, *caches, locations, cache_mode="Norm")
        else:
            self.store(key_cache, locations, key)
            self.store(value_cache, locations, value)


def reference(name: str) -> NPUDevice:
    """The same device over plain torch and host memory: what tests have for an NPU."""
    return NPUDevice(name, Reference())


def _flat(view: torch.Tensor) -> torch.Tensor | None:
    """Entries `[item * entry, ...]` of a view, where they lie at one distance from each other."""
    items, entries = view.shape[:2]
    if entries == 1:
        return view[:, 0]
    if items > 1 and view.stride(0) != entries * view.stride(1):
        return None
    return view.as_strided([items * entries, *view.shape[2:]], view.stride()[1:])


def _taken(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as a dtype that the operators take."""
    if tensor.dtype in TAKEN:
        return tensor
    return tensor.view(STAND_IN[tensor.element_size()])


def _at(slabs: Sequence[torch.Tensor], address: int, size: int) -> torch.Tensor:
    for slab in slabs:
        start = address - slab.data_ptr()
        if 0 <= start <= slab.numel() - size:
            return slab[start : start + size]
    raise ValueError(f"{size} bytes at {address:#x}: not in memory that this device allocated.")
