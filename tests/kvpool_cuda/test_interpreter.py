"""The interpreter patches triton.language once a launch, and restores it."""

from __future__ import annotations

import mmap

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


def test_pointers_of_32_bits_are_pointers():
    # where a Python that is no PIE has its heap
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40  # MAP_32BIT
    locations = torch.frombuffer(mmap.mmap(-1, 4096, flags=flags), dtype=torch.int64)[:2]
    assert locations.data_ptr() < 1 << 31
    locations[:] = torch.tensor([3, 9])
    view, values = zeros((3, 4, 8), torch.float32), zeros((2, 8), torch.float32) + 1
    device().store_rows([WriteRow(view, values)], locations)
    assert view.flatten(0, 1)[[3, 9]].eq(1).all() and view.sum() == 16
    device().copy_items([view.view(torch.uint8).flatten(1)], locations[:1] * 0, locations[1:] - 8)
    assert torch.equal(view[1], view[0])
