from .device import NPUDevice as NPUDevice
from .pools import (
    NPUMLA as NPUMLA,
    NPUIndexKey as NPUIndexKey,
    NPUMHAPool as NPUMHAPool,
    NPUMLAPool as NPUMLAPool,
    npu_order as npu_order,
)
