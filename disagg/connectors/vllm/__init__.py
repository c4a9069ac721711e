"""vLLM's engine over kvpool: `KvpoolConnector`, for vLLM 0.32 and 0.33 (docs/vllm.md).

Only `connector.py` imports vLLM; how a step is decided, what a layer's tensor means and what is
counted are tested without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from disagg.connectors.vllm.connector import KvpoolConnector

__all__ = ["KvpoolConnector", "register"]


def __getattr__(name: str) -> Any:
    if name == "KvpoolConnector":
        from disagg.connectors.vllm.connector import KvpoolConnector

        return KvpoolConnector
    raise AttributeError(name)


def register() -> None:
    """Called by vLLM's plugin group: `"kv_connector": "KvpoolConnector"` is enough from then on."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KvpoolConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("KvpoolConnector", __name__, "KvpoolConnector")
