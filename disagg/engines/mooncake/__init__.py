"""Engine `mooncake`."""

from disagg.engines.mooncake.engine import MooncakeEngine

__all__ = ["MooncakeEngine"]
