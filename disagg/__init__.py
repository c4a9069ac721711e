"""Moves KV state between pools: plans from layouts, engines that copy runs of bytes.

Names load on first use; `disagg.plan` never imports torch.
"""

from kvpool.extras import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
