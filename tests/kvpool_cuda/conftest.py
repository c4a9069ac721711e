"""Where there is a GPU, kernels run on it; elsewhere Triton's interpreter runs them on the host."""

from __future__ import annotations

import os

import torch

collect_ignore = ["test_interpreter.py"]
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    collect_ignore = ["gpu"]
