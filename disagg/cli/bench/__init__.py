"""Benchmarks of a device and its engines: every time is taken beside that of what bounds it."""
