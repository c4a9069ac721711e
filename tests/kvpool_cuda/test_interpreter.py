"""The interpreter patches triton.language once a launch, and restores it."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from kvpool.device.torch_ops import WriteRow
from tests.kvpool_cuda.devices import device, zeros


@pytest.fixture
def patched(monkeypatch):
    """The functions for which the language was patched, whether or not something was left to do."""
    found, patch = [], interpreter._patch_lang

    def noted(function):
        found.append(function.__name__)
        return patch(function)

    monkeypatch.setattr(interpreter, "_patch_lang", noted)
    return found


def store(locations):
    view, values = zeros((3, 4, 8), torch.float32), zeros((2, 8), torch.float32) + 1
    device().store_rows([WriteRow(view, values, None)] * 3, locations)
    return view


def test_the_language_is_patched_once_a_launch_and_restored(patched):
    for launches in (1, 2):
        view = store(torch.tensor([3, 9]))
        assert view.sum() == 16 and patched.count("_rows") == launches
        assert tl.core.is_builtin(tl.load)
    assert set(patched) <= {"_rows", "cdiv"}  # of another module


def test_the_language_is_restored_after_a_kernel_that_fails(monkeypatch, patched):
    monkeypatch.setattr(interpreter.interpreter_builder, "create_masked_load", None)
    with pytest.raises(Exception, match="NoneType"):
        store(torch.tensor([3, 9]))
    assert tl.core.is_builtin(tl.load) and interpreter._patch_lang.__name__ == "noted"
    monkeypatch.undo()
    assert store(torch.tensor([3, 9])).sum() == 16
