"""The Ascend device and its pools. `torch_npu` is imported where an NPU is used, and nowhere else.

Names load on first use; `docs/npu.md` says what is where, and how far it was tested.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.lazy import loader

if TYPE_CHECKING:
    from kvpool_npu.device import NPUDevice as NPUDevice
    from kvpool_npu.pools import NPUMHAPool as NPUMHAPool
    from kvpool_npu.pools import NPUMLAPool as NPUMLAPool
    from kvpool_npu.states import NPUMLA as NPUMLA
    from kvpool_npu.states import NPUIndexKey as NPUIndexKey
    from kvpool_npu.states import npu_order as npu_order

_HOME = {
    "NPUDevice": "device",
    "NPUIndexKey": "states",
    "NPUMHAPool": "pools",
    "NPUMLA": "states",
    "NPUMLAPool": "pools",
    "npu_order": "states",
}

__all__ = [*_HOME]

__getattr__ = loader(__name__, _HOME)
