"""Typed memory pools for the KV state of language models, described to the byte.

`import kvpool` is light: names load on first use, and `kvpool.layout` never loads torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
