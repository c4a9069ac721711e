"""What vLLM carries from its workers to its scheduler after each step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1 import base


@dataclass
class DamagedObjects(base.KVConnectorWorkerMetadata):
    """Names of objects that ranks have found damaged in a store."""

    names: list[str] = field(default_factory=list)

    def aggregate(self, other: base.KVConnectorWorkerMetadata) -> DamagedObjects:
        return DamagedObjects(self.names + getattr(other, "names", []))
