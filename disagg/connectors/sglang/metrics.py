"""Numbers on SGLang's /metrics, to which each process of an engine adds its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

from disagg.connectors.rank.instruments import Instruments, prometheus_classes
from disagg.connectors.rank.publisher import Publisher
from disagg.connectors.rank.stats import Stats
from disagg.store.stats import StoreStats

log = logging.getLogger("sglang.kvpool")


def publish(stats: Stats, server_args: Any, *, lines: bool = True) -> Publisher:
    """Tells the log, if it is to have `lines`, and with `--enable-metrics` Prometheus."""
    instruments = _instruments() if server_args.enable_metrics else None
    values = [str(server_args.served_model_name)]
    return Publisher(stats, instruments, values, log, lines=lines)


def publish_store(store: Callable[[], StoreStats], rank: int, server_args: Any) -> None:
    """Tells Prometheus of a store; its cache tells the log, with reasons."""
    if server_args.enable_metrics:
        stats = Stats(rank)
        stats.watch_store(store)
        publish(stats, server_args, lines=False)


@cache
def _instruments() -> Instruments:
    """Of this process, whose endpoints and store share them."""
    return Instruments(["model_name"], prometheus_classes(), mode="livesum")
