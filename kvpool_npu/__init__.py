"""The Ascend device and its pools. `torch_npu` is imported where an NPU is used, and nowhere else.

Names load on first use; `docs/npu.md` says what is where, and how far it was tested.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.lazy import exports

if TYPE_CHECKING:
    from kvpool_npu.device import NPUDevice as NPUDevice
    from kvpool_npu.pools import NPUMHAPool as NPUMHAPool
    from kvpool_npu.pools import NPUMLAPool as NPUMLAPool
    from kvpool_npu.states import NPUMLA as NPUMLA
    from kvpool_npu.states import NPUIndexKey as NPUIndexKey
    from kvpool_npu.states import npu_order as npu_order

__all__, __dir__, __getattr__ = exports(
    __name__,
    {
        "device": "NPUDevice",
        "states": "NPUIndexKey NPUMLA npu_order",
        "pools": "NPUMHAPool NPUMLAPool",
    },
)
