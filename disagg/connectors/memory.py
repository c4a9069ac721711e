"""vLLM's own allocation of KV memory, in memory that other processes can map."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvpool.device.cpu import CPUDevice


class SharedAllocation(TorchFunctionMode):
    """While it is entered, `torch.zeros(n, dtype=torch.int8)` on the CPU, as vLLM allocates KV
    memory, is shared memory of kvpool's CPU device: engine `local` of another process can map it.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and kwargs.get("dtype") is torch.int8 and len(args) == 1:
            device = torch.device(kwargs.get("device") or "cpu")
            if device.type == "cpu" and isinstance(args[0], int):
                return CPUDevice().allocate(args[0]).view(torch.int8)
        return func(*args, **kwargs)
