"""The torch-npu package's description of its operators, read from its files, never imported."""

from __future__ import annotations

import os
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch


@cache
def folder() -> Path | None:
    """The package's folder: inside KVPOOL_TORCH_NPU if that is set, else the installed one."""
    if named := os.environ.get("KVPOOL_TORCH_NPU"):
        found = Path(named) / "torch_npu"
        if not found.is_dir():
            raise FileNotFoundError(f"KVPOOL_TORCH_NPU={named}: it has no torch_npu.")
        return found
    spec = find_spec("torch_npu")
    places = spec.submodule_search_locations if spec else None
    return Path(places[0]) if places else None


def text(path: str) -> str:
    """The text of one of the package's files."""
    return (folder() / path).read_text(encoding="utf-8")


@cache
def schema(name: str) -> str:
    """The schema of an operator that the package exposes as `torch_npu.NAME`."""
    exposed = rf"^torch_npu\.{name} = torch\.ops\.npu\.{name}$"
    assert re.search(exposed, text("utils/custom_ops.py"), re.M)
    listed = text("csrc/aten/npu_native_functions_by_codegen.yaml")
    return re.search(rf"^(?:- |  )func: ({name}\(.*)$", listed, re.M)[1]


@cache
def documented(name: str) -> str:
    """The package's documentation of an operator."""
    found = re.search(
        rf'_add_torch_npu_docstr\(\s*"{name}",\s*"""(.*?)"""', text("_op_plugin_docs.py"), re.S
    )
    return found[1]


def dtypes(name: str, parameter: str) -> set[torch.dtype]:
    """The dtypes documented for a parameter, for any product, that torch has."""
    listed = documented(name).partition("参数说明")[2]
    paragraph = re.search(
        rf"^-? *{parameter}\b(.*?)(?=^-? *\w+ ?[:：（]|^输出)", listed, re.M | re.S
    )
    words = re.findall(r"数据类型支持([\w.、]+)", paragraph[1])
    names = [word.removeprefix("torch.") for each in words for word in re.split("[、和]", each)]
    found = (getattr(torch, "float32" if name == "float" else name, None) for name in names)
    return {dtype for dtype in found if isinstance(dtype, torch.dtype)}
