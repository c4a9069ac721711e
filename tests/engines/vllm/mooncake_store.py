"""vLLM's own MooncakeStoreConnector on a CPU, to compare with. All of it is vLLM's, but for the
event of CUDA for which its writing waits, and which a CPU's build of torch refuses to make.
"""

from __future__ import annotations

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector import (
    MooncakeStoreConnector,
)

__all__ = ["MooncakeStoreConnector"]


class PassedEvent:
    """What a CPU has computed is there when the call returns."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


torch.cuda.Event = PassedEvent  # type: ignore[assignment, misc]
