"""Names of a package that load on first use, so that importing the package costs nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def exports(
    package: str, modules: Mapping[str, str]
) -> tuple[list[str], Callable[[], list[str]], Callable[[str], Any]]:
    """`__all__`, `__dir__` and `__getattr__` of a package. `modules`: submodule to names."""
    home = {name: module for module, names in modules.items() for name in names.split()}

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home})

    def load(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{home[name]}"), name)

    return [*home], names, load
