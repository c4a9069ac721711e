"""Pools as the caches of model libraries. Each module imports the library that it serves."""

from kvpool.extras import needed_by

with needed_by(__name__):
    import torch as torch
    import transformers as transformers
