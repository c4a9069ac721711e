"""Pools as the caches of model libraries. Each module imports the library that it serves."""
