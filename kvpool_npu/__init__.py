"""The Ascend device and its pools (docs/npu.md). Names load on first use, and `torch_npu` is
imported only where an NPU is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.lazy import exports

if TYPE_CHECKING:
    from kvpool_npu.device import NPUDevice as NPUDevice
    from kvpool_npu.kinds import NPUMLA as NPUMLA
    from kvpool_npu.kinds import NPUIndexKey as NPUIndexKey
    from kvpool_npu.kinds import npu_order as npu_order
    from kvpool_npu.pools import NPUMHAPool as NPUMHAPool
    from kvpool_npu.pools import NPUMLAPool as NPUMLAPool

__all__, __dir__, __getattr__ = exports(
    __name__,
    {
        "device": "NPUDevice",
        "kinds": "NPUIndexKey NPUMLA npu_order",
        "pools": "NPUMHAPool NPUMLAPool",
    },
)
