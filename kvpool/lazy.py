"""Names of a package that load on first use, so that importing it costs nothing."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def loader(package: str, home: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__`: `home` says in which module of `package` each name is, and after a
    colon what it is called there.
    """

    def load(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, known_as = home[name].partition(":")
        return getattr(importlib.import_module(f"{package}.{module}"), known_as or name)

    return load
