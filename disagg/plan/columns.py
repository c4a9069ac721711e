"""Memory for the runs of a bound request."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_NONE = np.empty((3, 0), dtype=np.int64)


class Columns:
    """Reused memory for batches: page faults of fresh arrays cost more than filling them."""

    def __init__(self) -> None:
        self._held, self.capacity, self.pointer = _NONE, 0, 0

    def take(self, size: int) -> npt.NDArray[np.int64]:
        """Columns `[3, size]`, valid until the next call. The rows of all of them are `capacity`
        numbers apart, and the first begins at `pointer`.
        """
        if self.capacity < size:
            self._hold(max(size, 2 * self.capacity))
        return self._held[:, :size]

    def _hold(self, capacity: int) -> None:
        self._held = np.empty((3, capacity), dtype=np.int64)
        self.capacity, self.pointer = capacity, self._held.ctypes.data
