"""Metrics of endpoints for Prometheus (`disagg.prometheus`)."""

from disagg.prometheus import export

__all__ = ["export"]
