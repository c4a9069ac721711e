"""Typed memory pools for the KV state of language models, described to the byte.

`import kvpool` is light: names load on first use, and `kvpool.layout` never loads torch.
"""

from kvpool.extras import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
