"""Whatever a test of plans binds is bound both outside Python and by numpy, and compared."""

from __future__ import annotations

import numpy as np
import pytest

from disagg.plan import native
from disagg.plan.bind import Binder, Count
from disagg.plan.columns import Columns


@pytest.fixture(autouse=True)
def both_ways(monkeypatch):
    assert native.availability() is None, "kvpool's C code is not compiled"
    bind = Binder.bind

    def compared(self, source, dest, tokens, columns, layers=None, count=Count.KNOWN):
        found = bind(self, source, dest, tokens, columns, layers, count)
        plain = self._plain(source, dest, tokens, layers, Columns(), count)
        for mine, theirs in zip(found, plain):
            np.testing.assert_array_equal(mine, theirs)
            assert mine.strides == theirs.strides or not mine.size
        assert found.shares == plain.shares
        assert found.total == plain.total == int(plain.nbytes.sum())
        return found

    monkeypatch.setattr(Binder, "bind", compared)
