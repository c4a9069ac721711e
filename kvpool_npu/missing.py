"""What a machine lacks to use an NPU. torch_npu is imported only if nothing else is missing."""

from __future__ import annotations

import importlib
import os
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

from kvpool.extras import install


def missing(name: str) -> str | None:
    """None if NPU `name` (`npu`, `npu:3`) can be used, else everything that is missing."""
    number = name.partition(":")[2] or "0"
    if not number.isdecimal():
        return "an NPU is named by its number, as npu:0."
    absent = [
        what
        for what, present in (
            ("an NPU with its driver (/dev/davinci_manager)", _driver()),
            ("CANN (ASCEND_HOME_PATH with libascendcl.so: source its set_env.sh)", _cann()),
            (f"torch_npu ({install('npu')})", _package()),
        )
        if not present
    ]
    installed, needed = _version(), torch.__version__
    if installed and installed.split(".")[:2] != needed.split(".")[:2]:
        absent.append(f"the torch-npu for torch {needed} ({installed} is installed)")
    if absent:
        return f"missing: {'; '.join(absent)}."
    try:
        count = importlib.import_module("torch_npu").npu.device_count()
    except (ImportError, OSError, RuntimeError) as error:
        return f"torch_npu cannot be imported: {error}"
    return None if int(number) < count else f"{count} NPUs are visible, numbered from 0."


def _driver() -> bool:
    return Path("/dev/davinci_manager").exists()


def _cann() -> bool:
    home = os.environ.get("ASCEND_HOME_PATH")
    return home is not None and (Path(home) / "lib64" / "libascendcl.so").exists()


def _package() -> bool:
    try:
        return find_spec("torch_npu") is not None
    except ImportError:  # an import hook forbids it
        return False


def _version() -> str | None:
    try:
        return version("torch-npu")
    except PackageNotFoundError:
        return None
