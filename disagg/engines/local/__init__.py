"""Engine `local`."""

from disagg.engines.local.engine import LocalEngine

__all__ = ["LocalEngine"]
