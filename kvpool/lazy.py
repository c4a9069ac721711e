"""Packages whose names load on first use."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from kvpool.extras import missing


def attach(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package: every name that the stub beside `file`,
    the package's `__init__.py`, imports from a module is loaded from there. A name that needs an
    extra raises MissingExtra.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    homes = {
        alias.name: f"{package}.{node.module}"
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            found = getattr(import_module(homes[name]), name)
        except ImportError as error:
            raise missing(name, error) from None
        setattr(sys.modules[package], name, found)  # the next access does not come here
        return found

    names = sorted(homes)
    return load, names.copy, names
