from .device import NPUDevice as NPUDevice
from .kinds import NPUMLA as NPUMLA, NPUIndexKey as NPUIndexKey, npu_order as npu_order
from .pools import NPUMHAPool as NPUMHAPool, NPUMLAPool as NPUMLAPool
