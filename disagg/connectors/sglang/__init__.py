"""SGLang's engine over kvpool: `--disaggregation-transfer-backend kvpool`, for SGLang 0.5.22 and
0.5.23 (docs/sglang.md).

SGLang is imported where its plugin group calls `register`, and nowhere before. `pools.py` and
`metadata.py` are tested without it.
"""

from __future__ import annotations

from typing import Any

from disagg.connectors import sglang_store

__all__ = ["BACKEND", "register"]

BACKEND = "kvpool"


def register() -> None:
    """Called by SGLang's plugin group `sglang.srt.plugins` in each of its processes."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.disaggregation.utils import TransferBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if BACKEND in choices.DISAGG_TRANSFER_BACKEND_CHOICES:
        return
    choices.add_disagg_transfer_backend_choices([BACKEND])
    member = object.__new__(TransferBackend)
    member._name_, member._value_ = BACKEND.upper(), BACKEND
    TransferBackend._missing_ = classmethod(  # what Enum asks for a value that it has no member of
        lambda cls, value: member if value == BACKEND else None
    )
    package = "sglang.srt.disaggregation"
    for target, hook in (
        (f"{package}.utils.get_kv_class", _kv_class),
        (f"{package}.prefill.PrefillBootstrapQueue._init_kv_manager", _make_manager),
        (f"{package}.decode.DecodePreallocQueue._init_kv_manager", _make_manager),
    ):
        HookRegistry.register(target, hook, HookType.AROUND)
    sglang_store.register()


def _kv_class(original: Any, backend: Any, kind: Any) -> Any:
    if backend.value != BACKEND or kind.value == "kvargs":
        return original(backend, kind)
    from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

    from disagg.connectors.sglang import manager, transfers

    return {
        "bootstrap_server": CommonKVBootstrapServer,
        "manager": manager.KvpoolManager,
        "sender": transfers.KvpoolSender,
        "receiver": transfers.KvpoolReceiver,
    }[kind.value]


def _make_manager(original: Any, queue: Any) -> Any:
    """The queue's `_init_kv_manager`. It gives the manager pointers; the pools are the queue's."""
    manager = original(queue)
    if queue.transfer_backend.value == BACKEND:
        manager.start(queue)
    return manager
