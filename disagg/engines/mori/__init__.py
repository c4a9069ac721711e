"""Engine `mori`."""

from disagg.engines.mori.engine import MoriEngine

__all__ = ["MoriEngine"]
