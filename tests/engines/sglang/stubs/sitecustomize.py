"""Stands in for packages that SGLang imports when it starts and does not call on a CPU.

On PYTHONPATH of the tests' engine processes only. `STUBS` is the list; a package that is installed
is not replaced.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

STUBS = (
    *("blobfile", "cuda", "cutlass", "datasets", "decord", "deep_gemm", "flash_attn", "flashinfer"),
    *("humming", "modelscope", "nvshmem", "outlines", "pynvml", "quack", "sgl_kernel"),
    *("smg_grpc_servicer", "tilelang", "timm", "torchvision"),
)
ASK = ("accelerate", "huggingface_hub", "safetensors", "torch", "transformers")
"""Packages that look whether others are there, and go without."""


class Anything(type):
    """The class of a name that stands for whatever is asked of it."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *args: Any, **more: Any) -> Any:
        decorates = len(args) == 1 and callable(args[0]) and not more
        return args[0] if decorates and not isinstance(args[0], type) else cls

    def __iter__(cls) -> Any:
        return iter(())

    def __or__(cls, other: Any) -> Any:
        return cls

    def __ror__(cls, other: Any) -> Any:
        return cls

    def __getitem__(cls, key: Any) -> Any:
        return cls


class Stub(metaclass=Anything):
    """Any class, function or value."""

    def __init_subclass__(cls, **more: Any) -> None:
        pass


class StubModule(types.ModuleType):
    """Any module."""

    __path__ = ()
    __version__ = "12.9.9"  # nixl takes it for the major version of CUDA, and has a package for 12

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what nothing else has found."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in STUBS or asker() in ASK:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def asker() -> str:
    """The package that imports."""
    frame: Any = sys._getframe(2)
    while frame and "importlib" in frame.f_globals.get("__name__", ""):
        frame = frame.f_back
    return (frame.f_globals.get("__name__", "") if frame else "").partition(".")[0]


sys.meta_path.append(Finder())
