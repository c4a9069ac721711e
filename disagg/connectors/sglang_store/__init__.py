"""SGLang's radix cache over a store: `--radix-cache-backend kvpool` (docs/store.md)."""

from __future__ import annotations

from typing import Any

__all__ = ["BACKEND", "register"]

BACKEND = "kvpool"
UPDATES = "disk", "distributed", "tensor", "ipc"
"""From where SGLang takes other weights while it serves."""


def register() -> None:
    """Called with the transfer backend, in each of SGLang's processes."""
    from sglang.srt.mem_cache.registry import register_radix_cache_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    register_radix_cache_backend(BACKEND, _make)
    managers = "sglang.srt.managers"
    HookRegistry.register(f"{managers}.scheduler.Scheduler.__init__", _made, HookType.AFTER)
    updater = f"{managers}.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    for source in UPDATES:
        name = f"{updater}.update_weights_from_{source}"
        HookRegistry.register(name, _weights_changed, HookType.BEFORE)


def _make(ctx: Any) -> Any:
    from disagg.connectors.sglang_store.start import make_cache

    return make_cache(ctx)


def _made(_: Any, scheduler: Any, *args: Any, **more: Any) -> None:
    """SGLang asks the options, not the cache, whether there is a storage whose events it is to
    turn: this one uses its hooks for LMCache.
    """
    if hasattr(scheduler.tree_cache, "flows"):
        scheduler.enable_lmcache = True


def _weights_changed(updater: Any, *args: Any, **more: Any) -> None:
    """State of other weights would be stored as that of those that were there at the start."""
    cache = updater.scheduler.tree_cache
    if hasattr(cache, "flows"):
        cache.turn_off("its weights were updated.")
