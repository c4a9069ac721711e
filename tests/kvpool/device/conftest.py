from __future__ import annotations

import ctypes

import pytest

from kvpool import _native


@pytest.fixture(params=[128, 256, 512], ids=lambda width: f"{width} bits")
def vectors(request):
    """The widest vectors that rows are computed with, where the processor has them."""
    library = _native._library()
    assert library is not None, "kvpool's C code is not compiled"
    width = ctypes.c_int32.in_dll(library.quick, "kvpool_vector_bits")
    before, width.value = width.value, request.param
    yield request.param
    width.value = before
