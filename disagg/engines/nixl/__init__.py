"""Engine `nixl`."""

from disagg.engines.nixl.engine import NixlEngine

__all__ = ["NixlEngine"]
