"""Pools as the caches of model libraries. Each module imports the library that it serves."""

from kvpool.extras import require

for package in ("torch", "transformers"):
    require(__name__, package)
