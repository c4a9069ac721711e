"""What the devices need, and what of it is missing. Importing this imports no triton."""

from __future__ import annotations

from importlib import import_module

from kvpool.extras import install

MIN_TRITON = (3, 6)
"""Before this version Triton's division flushes subnormal numbers, and quantised bytes differ."""


def missing_triton() -> str | None:
    """Why the installed triton cannot be used, or None."""
    try:
        triton = import_module("triton")
    except ImportError as error:
        return f"triton cannot be imported ({error}): {install('cuda')}"
    version: str = triton.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_TRITON:
        oldest = ".".join(map(str, MIN_TRITON))
        return (
            f"triton {version} is too old, the kernels need {oldest} or newer, which PyTorch 2.10 "
            "and newer bring. Update torch."
        )
    return None


def interpreted() -> bool:
    """Whether triton interprets kernels on the host. Triton must be installed."""
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
            "or no device. `nvidia-smi` must list a GPU, CUDA_VISIBLE_DEVICES must not hide it, "
            f"and the driver must support CUDA {torch.version.cuda}."
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
