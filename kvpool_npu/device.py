"""The Ascend device: torch_npu's operators where they take a view, torch's indexing elsewhere.

Operators that write a cache need it contiguous, as in pools with a tensor per role. Rows that are
not adjacent (latent and rope in one row, heads before entries, sections of a convolution) are
indexed, which is correct everywhere and slower on an NPU.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Sequence

import torch

from kvpool.device import Event, torch_ops
from kvpool.device.quant import SMALLEST_SCALE, dequantise, quantise, stored_scales
from kvpool.device.torch_ops import ReadRow, WriteRow, bits, slots
from kvpool.layout.grid import Ints
from kvpool_npu.missing import missing
from kvpool_npu.operators import Operators, Reference, TorchNPU

# dtypes that each scattering operator takes. Others are viewed as one of the same size: the
# operators only move bytes
RESHAPE_DTYPES = (torch.float16, torch.bfloat16, torch.int8)
PA_SCATTER_DTYPES = (*RESHAPE_DTYPES, torch.float32)
SCATTER_DTYPES = (*PA_SCATTER_DTYPES, torch.int64, torch.bool)
VIEWED_AS = {1: torch.int8, 2: torch.float16, 4: torch.float32, 8: torch.int64}
# (stored dtype, float dtype, scale dtype) for which npu_dynamic_quant is used
DYNAMIC_QUANT = {
    (torch.int8, given, scale)
    for given in (torch.float16, torch.bfloat16)
    for scale in (torch.float16, torch.float32)
}
ROW_MULTIPLE = 32  # bytes: operators on two caches need rows that are multiples of this
MAX_GATHER_ROW = 148 << 10  # bytes: the longest row that npu_gather_pa_kv_cache takes
INT32_MAX = (1 << 31) - 1


class NPUDevice:
    """One NPU, or the `backend` given. `copy_runs` takes pointers to memory that this device
    allocated, and launches one copy for each run.
    """

    alignment = 2 << 20
    registration_limit = 256

    def __init__(self, name: str = "npu:0", backend: TorchNPU | Reference | None = None) -> None:
        self.name, self._backend = name, backend
        self.memory_kind = "npu" if backend is None else backend.memory_kind
        self.emulated = isinstance(backend, Reference)
        self._slabs: list[weakref.ref[torch.Tensor]] = []

    def availability(self) -> str | None:
        """Everything that is missing to use the NPU."""
        return missing(self.name) if self._backend is None else None

    @property
    def backend(self) -> TorchNPU | Reference:
        """Operators, memory and streams; the first access imports torch_npu."""
        if self._backend is None:
            index = int(self.name.partition(":")[2] or 0)
            self._backend = TorchNPU(importlib.import_module("torch_npu"), index)
        return self._backend

    @property
    def operators(self) -> Operators:
        """The operators of the backend."""
        return self.backend.operators

    def allocate(self, nbytes: int, alignment: int | None = None) -> torch.Tensor:
        """See Device.allocate. Up to `alignment` bytes before it are unused."""
        step = alignment or self.alignment
        wider = self.backend.zeros(nbytes + step)
        slab = wider[-wider.data_ptr() % step :][:nbytes]
        self._slabs = [
            *(slab_ref for slab_ref in self._slabs if slab_ref() is not None),
            weakref.ref(slab),
        ]
        return slab

    def store_rows(self, rows: Sequence[WriteRow], locations: torch.Tensor) -> None:
        """See Device.store_rows. Two caches of equal pages and heads, K and V, are one launch. e4m3
        needs an NPU that supports it (A5).
        """
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        for view, values, scales in rows:
            if scales is None:
                parts.append((view, values))
            else:
                codes, factors = self._quantised(view, scales, values)
                parts += (view, codes), (scales, factors)
        first: dict[object, tuple[torch.Tensor, torch.Tensor]] = {}
        for view, values in parts:
            kind = (view.dtype, view.shape[:3])
            if view.dim() != 4 or not view.is_contiguous():
                self._write(view, locations, values)
            elif kind in first:
                self._write_pair(*first.pop(kind), view, values, locations)
            else:
                first[kind] = view, values
        for view, values in first.values():
            self._write(view, locations, values)

    def load_rows(self, rows: Sequence[ReadRow], locations: torch.Tensor) -> list[torch.Tensor]:
        """See Device.load_rows. Any two views with the same number of slots are one launch."""
        views = [view for row in rows for view in row[:2] if view is not None]
        read = iter(self._gathered(views, locations))
        return [
            next(read) if scales is None else dequantise(next(read), next(read), dtype)
            for _, scales, dtype in rows
        ]

    def copy_items(
        self,
        views: Sequence[torch.Tensor],
        src: torch.Tensor,
        dst: torch.Tensor,
        disjoint: bool = False,
    ) -> None:
        """See Device.copy_items."""
        for first in range(0, len(views), 2):
            pair = [view[:, None] for view in views[first : first + 2]]
            for view, items in zip(pair, self._gathered(pair, src)):
                self._write(view, dst, items)

    def copy_runs(self, src: Ints, dst: Ints, nbytes: Ints) -> None:
        """See Device.copy_runs. Raises ValueError for a run outside what this device allocated."""
        slabs = [slab for slab_ref in self._slabs if (slab := slab_ref()) is not None]
        for start, to, size in zip(src.tolist(), dst.tolist(), nbytes.tolist()):
            _at(slabs, to, size).copy_(_at(slabs, start, size))

    def record(self) -> Event:
        """See Device.record."""
        return self.backend.record()

    def wait(self, event: Event) -> None:
        """See Device.wait."""
        self.backend.wait(event)

    def _write(self, view: torch.Tensor, locations: torch.Tensor, values: torch.Tensor) -> None:
        if not locations.numel():
            return
        flat = slots(view)
        if flat is None:
            torch_ops.write_entries(view, locations, values)
        elif flat.is_contiguous():
            self.operators.npu_scatter_nd_update_(
                _taken(flat.flatten(1)), locations[:, None], _taken(values.flatten(1))
            )
        else:
            bits(flat)[locations] = bits(values)

    def _read(self, view: torch.Tensor, locations: torch.Tensor) -> torch.Tensor:
        flat = slots(view)
        if flat is None:
            return torch_ops.read_entries(view, locations)
        return _taken(flat).index_select(0, locations).view(view.dtype)

    def _quantised(
        self, view: torch.Tensor, scales: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kinds = view.dtype, values.dtype, scales.dtype
        if kinds not in DYNAMIC_QUANT or scales.shape[-1] > 1 or not values.numel():
            return quantise(values, scales.shape[-1], scales.dtype, view.dtype)
        codes, factors = self.operators.npu_dynamic_quant(values, dst_type=view.dtype)
        # its result for infinities and NaN is undocumented
        wrong = ~torch.linalg.vector_norm(values, torch.inf, dim=-1, keepdim=True).isfinite()
        factors = factors[..., None].clamp_min(SMALLEST_SCALE).masked_fill(wrong, torch.nan)
        return codes.masked_fill(wrong, 0), stored_scales(factors, scales.dtype)

    def _write_pair(
        self,
        key_cache: torch.Tensor,
        key: torch.Tensor,
        value_cache: torch.Tensor,
        value: torch.Tensor,
        locations: torch.Tensor,
    ) -> None:
        caches = _taken(key_cache), _taken(value_cache)
        keys, values = _taken(key).contiguous(), _taken(value).contiguous()
        dtype, row = caches[0].dtype, caches[0][0, 0]
        if not locations.numel():
            return
        if (
            dtype in RESHAPE_DTYPES
            and key_cache.shape == value_cache.shape
            and row.numel() * row.element_size() % ROW_MULTIPLE == 0
            and key_cache.shape[0] * key_cache.shape[1] <= INT32_MAX
        ):
            with self.backend.current():  # ATB uses the stream of the current NPU
                self.operators._npu_reshape_and_cache(
                    key=keys,
                    value=values,
                    key_cache=caches[0],
                    value_cache=caches[1],
                    slot_indices=locations.to(torch.int32),
                )
        elif dtype in PA_SCATTER_DTYPES:
            self.operators.npu_scatter_pa_kv_cache(
                keys, values, caches[0], caches[1], locations, cache_mode="Norm"
            )
        else:
            self._write(key_cache, locations, key)
            self._write(value_cache, locations, value)

    def _gathered(
        self, views: Sequence[torch.Tensor], locations: torch.Tensor
    ) -> list[torch.Tensor]:
        read: dict[int, torch.Tensor] = {}
        unpaired: dict[int, int] = {}  # by number of slots
        for number, view in enumerate(views):
            size = view.shape[:2].numel()
            if not _gathers(view, locations.numel()):
                read[number] = self._read(view, locations)
            elif size in unpaired:
                partner = unpaired.pop(size)
                read[partner], read[number] = self._read_pair(views[partner], view, locations)
            else:
                unpaired[size] = number
        read |= {number: self._read(views[number], locations) for number in unpaired.values()}
        return [read[number] for number in range(len(views))]

    def _read_pair(
        self, key_cache: torch.Tensor, value_cache: torch.Tensor, locations: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        caches, count = (key_cache, value_cache), locations.numel()
        outputs = [torch.empty(count, *c.shape[2:], dtype=c.dtype, device=c.device) for c in caches]
        word = torch.int8 if min(c.element_size() for c in caches) == 1 else torch.float16
        # each entry is a page, and each location a sequence of one page
        key_pages, value_pages = (c.view(-1, 1, 1, c[0, 0].numel()).view(word) for c in caches)
        key, value = (rows.view(count, 1, -1).view(word) for rows in outputs)
        table = locations.to(torch.int32)[:, None]
        self.operators.npu_gather_pa_kv_cache(
            key_pages, value_pages, table, torch.ones_like(table[:, 0]), key, value
        )
        return outputs[0], outputs[1]


def reference(name: str) -> NPUDevice:
    """The device over plain torch and host memory, for tests without an NPU."""
    return NPUDevice(name, Reference())


def _gathers(view: torch.Tensor, count: int) -> bool:
    """Whether npu_gather_pa_kv_cache can read `count` entries of a view. Its kernel for A2 and A3
    counts in 32 bits.
    """
    row = view[0, 0].nbytes
    aligned = 0 < row <= MAX_GATHER_ROW and row % ROW_MULTIPLE == 0
    fits = max(view.nbytes, count * row) <= INT32_MAX
    return count > 0 and aligned and fits and view.is_contiguous()


def _taken(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes in a dtype that the operators take."""
    if tensor.dtype in SCATTER_DTYPES:
        return tensor
    return tensor.view(VIEWED_AS[tensor.element_size()])


def _at(slabs: Sequence[torch.Tensor], pointer: int, size: int) -> torch.Tensor:
    for slab in slabs:
        start = pointer - slab.data_ptr()
        if 0 <= start <= slab.numel() - size:
            return slab[start : start + size]
    raise ValueError(f"{size} bytes at {pointer:#x} are not in memory that this device allocated.")
