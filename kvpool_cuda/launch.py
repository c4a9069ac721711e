# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Common parts of launches and kernels: device, constants, upload of host arrays, argument checks,
pointers given as integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from importlib import import_module
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from kvpool_cuda.device import interpreted

_interpreter = Lock()


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Launches in this context run on `device`."""
    return torch.cuda.device(device) if device.type == "cuda" else _interpreting()


@contextmanager
def _interpreting() -> Iterator[None]:
    """Triton's interpreter is shared by all threads. Its numpy warns of infinities and NaN."""
    with _interpreter, np.errstate(all="ignore"), _patching_once():
        yield


@contextmanager
def _patching_once() -> Iterator[None]:
    """The interpreter puts its functions into triton.language for each launch, and again for each
    call of a function in a kernel, which takes most of its time: here once a launch.
    """
    interpreter: Any = import_module("triton.runtime.interpreter")
    patch = interpreter._patch_lang

    def patch_once(function: Any) -> Any:
        languages = [
            module for module in function.__globals__.values() if module is tl or module is tl.core
        ]
        done = not any(tl.core.is_builtin(language.load) for language in languages)
        return interpreter._LangPatchScope() if done else patch(function)

    interpreter._patch_lang = patch_once
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
    """Tuples of numbers as a kernel's constants. Compilers before Triton 3.8 need them wrapped, the
    interpreter does not take them so.
    """
    return parts if interpreted() else tuple(tl.constexpr(part) for part in parts)


def upload(array: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Copies an int64 array to `device` on the current stream, without waiting. Raises RuntimeError
    during the capture of a CUDA graph: a replay would read host memory that is freed by then.
    """
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return host
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph cannot capture arrays in host memory. Call copy_runs outside of the "
            "capture, and copy_items once before the capture."
        )
    return host.pin_memory().to(device, non_blocking=True)


def upload_for_all(array: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """The same, usable on every stream: waits for the copy and for no other work."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return upload(array, device)  # or raises
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        uploaded = upload(array, device)
    stream.synchronize()
    return uploaded


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
    if WORD == 8:
        pointer = address.to(tl.pointer_type(tl.int64))
    elif WORD == 4:
        pointer = address.to(tl.pointer_type(tl.int32))
    elif WORD == 2:
        pointer = address.to(tl.pointer_type(tl.int16))
    else:
        pointer = address.to(tl.pointer_type(tl.uint8))
    return tl.multiple_of(pointer, ALIGNED)
