# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Common parts of launches and kernels: device, constants, upload, checks, pointers from integers;
and how a kernel walks strided tensors: which axes fuse, and how wide an access can be.

Sizes become constants of a kernel, so that its divisions are cheap. Strides and pointers stay
arguments, so that another batch length compiles nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from importlib import import_module
from math import gcd, prod
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from kvpool.layout.grid import Ints
from kvpool_cuda.device import interpreted

WIDEST = 16
"""Bytes of the widest access of a lane."""
_interpreter = Lock()


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Launches in this context run on `device`."""
    return torch.cuda.device(device) if device.type == "cuda" else _interpreting()


@contextmanager
def _interpreting() -> Iterator[None]:
    """Triton's interpreter is shared by all threads. Its numpy warns of infinities and NaN. It puts
    its functions into triton.language for each launch, and again for each call of a function in a
    kernel, which takes most of its time: here once a launch.
    """
    interpreter: Any = import_module("triton.runtime.interpreter")

    def patch_once(function: Any) -> Any:
        languages = [
            module for module in function.__globals__.values() if module is tl or module is tl.core
        ]
        done = not any(tl.core.is_builtin(language.load) for language in languages)
        return interpreter._LangPatchScope() if done else patch(function)

    with _interpreter, np.errstate(all="ignore"):
        patch, interpreter._patch_lang = interpreter._patch_lang, patch_once
        try:
            yield
        finally:
            interpreter._patch_lang = patch


class LaunchPart(NamedTuple):
    """One row of a launch: the kernel's constants and arguments, and how many programs it takes."""

    constants: tuple[int, ...]
    arguments: tuple[int, ...]
    programs: int


@lru_cache(maxsize=4096)
def constants(*parts: tuple[int, ...]) -> tuple[Any, ...]:
    """A kernel's constants. Compilers before Triton 3.8 need them wrapped, its interpreter not."""
    return parts if interpreted() else tuple(tl.constexpr(part) for part in parts)


def upload(columns: Sequence[Ints], device: torch.device, axis: int = 0) -> torch.Tensor:
    """Stacks int64 columns and copies them to `device` on the current stream, without waiting.
    Raises RuntimeError during the capture of a CUDA graph: a replay would read host memory that
    has been freed.
    """
    on_gpu = device.type == "cuda"
    if on_gpu and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph cannot capture arrays in host memory. Call copy_runs outside of the "
            "capture, and copy_items once before the capture."
        )
    shape = [columns[0].size]
    shape.insert(axis, len(columns))
    host = torch.empty(shape, dtype=torch.int64, pin_memory=on_gpu)
    np.stack(columns, axis=axis, out=host.numpy())
    return host.to(device, non_blocking=True) if on_gpu else host


def checked(
    name: str,
    view: torch.Tensor,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
) -> None:
    """Raises ValueError unless a tensor has this shape and dtype (None: any) and is on the view's
    device. Kernels see only pointers and would read anything.
    """
    fits = tensor.shape == shape and tensor.dtype is (dtype or tensor.dtype)
    if not fits or tensor.device != view.device:
        raise ValueError(
            f"{name}: {list(tensor.shape)} {tensor.dtype} on {tensor.device}, expected "
            f"{list(shape)} {dtype or 'floats'} on {view.device}. Convert them first."
        )


@triton.jit
def words_at(address, WORD: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer to integer words of `WORD` bytes; the address is a multiple of `ALIGNED` bytes. The
    compiler merges two adjacent words of 8 bytes into one access of 16.
    """
    # of an argument that fits, as a host's low addresses do, Triton makes 32 bits
    address = address.to(tl.int64)
    if WORD == 8:
        pointer = address.to(tl.pointer_type(tl.int64))
    elif WORD == 4:
        pointer = address.to(tl.pointer_type(tl.int32))
    elif WORD == 2:
        pointer = address.to(tl.pointer_type(tl.int16))
    else:
        pointer = address.to(tl.pointer_type(tl.uint8))
    return tl.multiple_of(pointer, ALIGNED)


class Dim(NamedTuple):
    """One dimension of tensors that are walked together: its size, and its stride in each."""

    size: int
    strides: tuple[int, ...]


def fused(axes: Iterable[Dim]) -> list[Dim]:
    """The same walk with as few dimensions as possible, innermost first in the last tensor."""
    left: list[Dim] = []
    for axis in sorted((a for a in axes if a.size > 1), key=lambda a: (a.strides[-1], a.size)):
        inner = left[-1] if left else None
        if inner and axis.strides == tuple(inner.size * stride for stride in inner.strides):
            left[-1] = Dim(inner.size * axis.size, inner.strides)
        else:
            left.append(axis)
    return left


class AccessPattern(NamedTuple):
    """A walk in units of `unit` bytes: `sizes`, innermost first, and strides by tensor."""

    unit: int
    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]

    @property
    def units(self) -> int:
        """Units in all."""
        return prod(self.sizes)


def access_pattern(axes: Sequence[Dim], itemsize: int, fixed: Iterable[int]) -> AccessPattern:
    """The walk over elements of `itemsize` bytes at axes with strides in bytes. Units are as wide
    as the strides and the `fixed` byte counts (pointers, row strides) allow.
    """
    tensors = len(axes[0].strides)
    inner, *outer = fused((Dim(itemsize, (1,) * tensors), *axes)) or [Dim(1, (1,) * tensors)]
    run = inner.size if set(inner.strides) == {1} else 1
    if run == 1:
        outer.insert(0, inner)
    unit = gcd(WIDEST, run, *fixed, *(stride for axis in outer for stride in axis.strides))
    steps = [Dim(run // unit, (1,) * tensors)] if run > unit or not outer else []
    steps += [Dim(a.size, tuple(stride // unit for stride in a.strides)) for a in outer]
    strides = tuple(zip(*(axis.strides for axis in steps)))
    return AccessPattern(unit, tuple(axis.size for axis in steps), strides)


def power_of_two(number: int) -> int:
    """The smallest power of two from `number` on."""
    return 1 << (number - 1).bit_length()


def columns(units: int, most: int) -> int:
    """Units of a row for one program: the largest power of two, from 16 (or the row) to `most`,
    that leaves at most one unit in eight idle; if there is none, the one that leaves the fewest.
    """
    sizes = [min(power_of_two(units), most)]
    while sizes[-1] > 16:
        sizes.append(sizes[-1] // 2)
    taken = {size: -(-units // size) * size for size in sizes}
    enough = max(min(taken.values()), units * 9 // 8)
    return next(size for size in sizes if taken[size] <= enough)
