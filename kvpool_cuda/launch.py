"""What every launch shares: where it runs, what its constants are, how host arrays reach it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl

from kvpool_cuda.availability import interpreted

_interpreter = Lock()


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Launches inside go to `device`."""
    return torch.cuda.device(device) if device.type == "cuda" else _interpreting()


@contextmanager
def _interpreting() -> Iterator[None]:
    """Triton's interpreter is one for all threads. Infinities and NaN are no news to its numpy."""
    with _interpreter, np.errstate(all="ignore"):
        yield


@lru_cache(maxsize=4096)
def constants(*parts: tuple[int, ...]) -> tuple[Any, ...]:
    """Tuples of numbers as a kernel's constants: compilers before Triton 3.8 see each only if it is
    wrapped, and the interpreter only if it is not.
    """
    return parts if interpreted() else tuple(tl.constexpr(part) for part in parts)


def upload(array: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """An int64 array on `device`, for the current stream and without waiting. Raises RuntimeError
    in the capture of a CUDA graph, which would read host memory that is gone when it is replayed.
    """
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return host
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "arrays of the host cannot become part of a CUDA graph. Do this outside of its "
            "capture; of copy_items, do it once before."
        )
    return host.pin_memory().to(device, non_blocking=True)


def upload_for_all(array: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """The same for every stream: waits for the copy, and for no other work."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return upload(array, device)  # or its refusal
    aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(aside):
        held = upload(array, device)
    aside.synchronize()
    return held


def checked(
    what: str,
    view: torch.Tensor,
    given: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
) -> None:
    """Raises ValueError unless a tensor lies beside a view and is of a shape and a dtype (None:
    any). Kernels see addresses, and would read anything.
    """
    fits = given.shape == shape and given.dtype is (dtype or given.dtype)
    if not fits or given.device != view.device:
        raise ValueError(
            f"{what}: {list(given.shape)} {given.dtype} on {given.device}, needed are "
            f"{list(shape)} {dtype or 'floats'} on {view.device}. Convert them first."
        )
