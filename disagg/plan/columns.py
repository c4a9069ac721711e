"""Memory for the runs of a bound request."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class Columns:
    """Reused memory for batches: page faults of fresh arrays cost more than filling them."""

    def __init__(self) -> None:
        self._columns: npt.NDArray[np.int64] = np.empty((3, 0), dtype=np.int64)

    def take(self, size: int) -> npt.NDArray[np.int64]:
        """Columns `[3, size]`, valid until the next call."""
        capacity = self._columns.shape[1]
        if capacity < size:
            self._columns = np.empty((3, max(size, 2 * capacity)), dtype=np.int64)
        return self._columns[:, :size]
