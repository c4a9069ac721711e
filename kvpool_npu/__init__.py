"""The Ascend device and its pools (docs/npu.md). Names load on first use, and `torch_npu` is
imported only where an NPU is used.
"""

from kvpool.extras import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
