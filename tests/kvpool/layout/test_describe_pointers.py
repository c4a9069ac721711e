"""Memory described by its pointer is described as the tensor that it is."""

from __future__ import annotations

import pytest
import torch

from kvpool.describe import describe, describe_buffer, describe_pointers
from kvpool.layout import LayoutError

DIMS = ("item", "entry", "head", "dim")


def told(tensor: torch.Tensor):
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


STACKED = torch.zeros(2, 3, 10, 16, 4, 8, dtype=torch.bfloat16)
PAGED = torch.zeros(10, 2, 16, 4, 8, dtype=torch.float16)
HEADS = torch.zeros(10, 16, 8, 8)[:, :, 2:6]
CASES = {
    "stacked": (
        STACKED,
        ("role", "layer", *DIMS),
        {"role": ("k", "v"), "layer": range(3), "shards": {"head": (4, 8)}},
    ),
    "side by side": (PAGED, ("item", "role", *DIMS[1:]), {"role": ("k", "v"), "layer": 5}),
    "a slice": (HEADS, DIMS, {"role": "k", "layer": 0, "owner": "draft", "padding": True}),
    "transposed": (
        HEADS.permute(0, 2, 3, 1),
        ("item", "head", "dim", "entry"),
        {"role": "k", "layer": 0, "cell": None, "space": "swa"},
    ),
}


@pytest.mark.parametrize(("tensor", "dims", "names"), CASES.values(), ids=CASES)
def test_a_pointer_is_described_as_its_tensor(tensor, dims, names):
    assert describe_pointers(*told(tensor), dims, **names) == describe(tensor, dims, **names)


def test_without_strides_it_is_contiguous():
    ptr, shape, _, dtype = told(STACKED[0, 0])
    seen = describe_pointers(ptr, shape, None, dtype, DIMS, role="k", layer=0)
    assert seen == describe(STACKED[0, 0], DIMS, role="k", layer=0)


def test_memory_and_dtype_are_those_that_are_named():
    seen = describe_pointers(
        1 << 40, (8, 64, 576), None, "e4m3", ("item", "entry", "dim"), role="latent", layer=3,
        memory="cuda:1",
    )  # fmt: skip
    (home,), (region,) = seen.buffers, seen.regions
    assert (home.base, home.item_bytes, home.items, home.memory) == (1 << 40, 36864, 8, "cuda:1")
    assert (region.dtype, region.width) == ("float8_e4m3fn", 576)


@pytest.mark.parametrize(
    ("ptr", "shape", "strides", "dims", "said"),
    [
        (4096, (4, 16, 8), (128, 8), DIMS, "as many strides as dims"),
        (4096, (4, 16, 2, 8), (-256, 16, 8, 1), DIMS, "none of these numbers negative"),
        (-1, (4, 16, 2, 8), None, DIMS, "pointer -1"),
        (4096, (4, 16, 2, 8), (128, 16, 8, 1), DIMS, "overlap"),
    ],
)
def test_what_does_not_fit_is_refused(ptr, shape, strides, dims, said):
    with pytest.raises(LayoutError) as refused:
        describe_pointers(ptr, shape, strides, "f32", dims, role="k", layer=0)
    assert said in str(refused.value)


def test_a_buffer_of_other_memory_is_refused():
    home = describe_buffer(HEADS, DIMS, name="k.0")
    with pytest.raises(LayoutError, match=r"is on cuda:0, buffer k\.0 on cpu"):
        describe_pointers(*told(HEADS), DIMS, role="k", layer=0, buffer=home, memory="cuda:0")
