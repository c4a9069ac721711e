"""The Ascend device and its pools (docs/npu.md). Names load on first use, and `torch_npu` is
imported only where an NPU is used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
