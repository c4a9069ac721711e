"""What devices of this package do to memory. Kernels, and with them triton, are imported at the
first call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvpool.device.torch_ops import Held, Row
from kvpool.layout.grid import Ints


def store(view: torch.Tensor, locations: torch.Tensor, values: torch.Tensor) -> None:
    """See Device.store."""
    store_rows((Row(view, values),), locations)


def load(view: torch.Tensor, locations: torch.Tensor) -> torch.Tensor:
    """See Device.load."""
    (found,) = load_rows((Held(view),), locations)
    return found


def quantize_store(
    view: torch.Tensor, scales: torch.Tensor, locations: torch.Tensor, values: torch.Tensor
) -> None:
    """See Device.quantize_store."""
    store_rows((Row(view, values, scales),), locations)


def store_rows(rows: Sequence[Row], locations: torch.Tensor) -> None:
    """See Device.store_rows."""
    from kvpool_cuda.entries import store_rows as launch

    launch(rows, locations)


def load_rows(rows: Sequence[Held], locations: torch.Tensor) -> list[torch.Tensor]:
    """See Device.load_rows."""
    from kvpool_cuda.entries import load_rows as launch

    return launch(rows, locations)


def copy_items(
    views: Sequence[torch.Tensor], src: torch.Tensor, dst: torch.Tensor, disjoint: bool = False
) -> None:
    """See Device.copy_items."""
    from kvpool_cuda.move import copy_items as launch

    launch(views, src, dst, disjoint)


def copy_runs(device: torch.device, src: Ints, dst: Ints, nbytes: Ints) -> None:
    """See Device.copy_runs; all addresses are those of `device`."""
    from kvpool_cuda.runs import copy_runs as launch

    launch(device, src, dst, nbytes)
