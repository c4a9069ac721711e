"""Metrics of endpoints for Prometheus (`disagg.prometheus`)."""

from disagg.prometheus import Observed, Server, export

__all__ = ["Observed", "Server", "export"]
