"""Moves KV state between pools: plans from layouts, engines that copy runs of bytes.

Names load on first use; `disagg.plan` never imports torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
