"""Serving engines that use `disagg`, one folder each. Nothing else here imports an engine."""
