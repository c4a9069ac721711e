"""The interpreter patches triton.language once a launch, and restores it."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from kvpool.device.torch_ops import WriteRow
from tests.kvpool_cuda.devices import device, zeros


def test_the_language_is_patched_once_a_launch_and_restored_whether_or_not_it_fails(monkeypatch):
    launches, patch = [], interpreter._patch_lang

    def noted(function):
        launches.append(function.__name__)
        return patch(function)

    def store():
        view, values = zeros((3, 4, 8), torch.float32), zeros((2, 8), torch.float32) + 1
        device().store_rows([WriteRow(view, values)] * 3, torch.tensor([3, 9]))
        return view

    monkeypatch.setattr(interpreter, "_patch_lang", noted)
    with monkeypatch.context() as broken, pytest.raises(Exception, match="NoneType"):
        broken.setattr(interpreter.interpreter_builder, "create_masked_load", None)
        store()
    for count in (2, 3):
        assert tl.core.is_builtin(tl.load) and interpreter._patch_lang is noted
        assert store().sum() == 16 and launches.count("_rows") == count
    assert set(launches) <= {"_rows", "cdiv"}  # of another module
