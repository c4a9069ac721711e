"""The Ascend device and its pools (docs/npu.md). Names load on first use, and `torch_npu` is
imported only where an NPU is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.lazy import loader

if TYPE_CHECKING:
    from kvpool_npu.device import NPUDevice as NPUDevice
    from kvpool_npu.kinds import NPUMLA as NPUMLA
    from kvpool_npu.kinds import NPUIndexKey as NPUIndexKey
    from kvpool_npu.kinds import npu_order as npu_order
    from kvpool_npu.pools import NPUMHAPool as NPUMHAPool
    from kvpool_npu.pools import NPUMLAPool as NPUMLAPool

_HOME = {
    "NPUDevice": "device",
    "NPUIndexKey": "kinds",
    "NPUMHAPool": "pools",
    "NPUMLA": "kinds",
    "NPUMLAPool": "pools",
    "npu_order": "kinds",
}

__all__ = [*_HOME]

__getattr__ = loader(__name__, _HOME)
