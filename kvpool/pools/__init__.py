"""Pools: memory, its typed reads and writes, and the classes that say which states they hold."""
