"""What a device needs, and what of it is missing. Imports neither triton nor a kernel."""

from __future__ import annotations

from importlib import import_module

OLDEST = (3, 6)
"""Triton's first version whose division keeps numbers below the normal range: before, bytes of
quantised blocks of such numbers would differ.
"""


def missing_triton() -> str | None:
    """What is wrong with the installed triton, or None."""
    try:
        triton = import_module("triton")
    except ImportError as error:
        return f"triton cannot be imported ({error}). Install kvpool[cuda]."
    version: str = triton.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return (
            f"triton {version} is too old, the kernels need {oldest} or newer, which PyTorch 2.10 "
            "and newer bring. Update torch."
        )
    return None


def interpreted() -> bool:
    """Whether triton was imported to interpret kernels on the host. Call it where triton is
    there.
    """
    language = import_module("triton.language")
    interpreter = import_module("triton.runtime.interpreter")
    return isinstance(language.cdiv, interpreter.InterpretedFunction)


def missing_interpreter() -> str | None:
    """Why kernels cannot be interpreted in this process, or None."""
    reason = missing_triton()
    if reason is not None or interpreted():
        return reason
    return (
        "triton was imported to compile kernels for a GPU. Set TRITON_INTERPRET=1 before the "
        "process starts."
    )


def missing_cuda(index: int) -> str | None:
    """Why CUDA device `index` cannot be used in this process, or None."""
    import torch

    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is built without CUDA. Install a build of torch for CUDA "
            "(https://pytorch.org/get-started/locally)."
        )
    count = torch.cuda.device_count()
    if not torch.cuda.is_available() or count == 0:
        return (
            f"no usable GPU: torch {torch.__version__} (CUDA {torch.version.cuda}) finds no driver "
            "or no device. `nvidia-smi` must list one, CUDA_VISIBLE_DEVICES must not hide it, and "
            f"the driver must be new enough for CUDA {torch.version.cuda}."
        )
    if index >= count:
        return f"there are {count} CUDA devices: cuda:0 to cuda:{count - 1}."
    reason = missing_triton()
    if reason is not None:
        return reason
    if interpreted():
        return (
            "TRITON_INTERPRET=1 was set when triton was imported: kernels would run on the host, "
            "which cannot reach this memory. Unset it, or ask for device 'interpret'."
        )
    return None
