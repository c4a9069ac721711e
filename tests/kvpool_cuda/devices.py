"""The device whose kernels are tested, and memory on it."""

from __future__ import annotations

import torch

from kvpool.device import get_device, torch_ops

NAME = "cuda:0" if torch.cuda.is_available() else "interpret"
MEMORY = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def device():
    return get_device(NAME)


def zeros(shape, dtype):
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return device().allocate(nbytes).view(dtype).view(shape)


def as_bits(tensor):
    """A tensor's bits as integers on the host."""
    return torch_ops.bits(tensor.cpu())
