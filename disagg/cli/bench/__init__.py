"""Benchmarks of a device and its engines, each timed in turn with the copy that bounds it."""
