"""Packages and hardware that only some parts need, and names of packages that load on first use.
Where a package is not installed, MissingExtra has the command: `MHAPool needs PyTorch: pip install
'kvpool[torch]'`.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

EXTRAS = {
    "aiohttp": ("aiohttp", "proxy"),
    "cryptography": ("cryptography", "keys"),
    "obstore": ("obstore", "store"),
    "prometheus_client": ("prometheus-client", "metrics"),
    "rich": ("rich", "cli"),
    "torch": ("PyTorch", "torch"),
    "transformers": ("transformers", "demo"),
    "triton": ("Triton", "cuda"),
    "typer": ("typer", "cli"),
    "xxhash": ("xxhash", "store"),
}
"""By imported package: its name for a reader, and the extra of kvpool that installs it."""


class MissingExtra(ModuleNotFoundError):
    """A package of an optional part is not installed; the message has the command."""


def install(extra: str) -> str:
    """The command that adds an extra to kvpool; pip leaves that as it is, wherever it is from."""
    return f"pip install 'kvpool[{extra}]'"


def needs(package: str) -> str:
    """`needs PyTorch: pip install 'kvpool[torch]'`, of a package of an extra."""
    name, extra = EXTRAS[package]
    return f"needs {name}: {install(extra)}"


def missing(what: str, error: ImportError) -> ImportError:
    """MissingExtra, `WHAT needs ...`, if an extra's package is not there; else `error` itself."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS or not isinstance(error, ModuleNotFoundError):
        return error
    return MissingExtra(f"{what} {needs(package)}", name=package)


@contextmanager
def needed_by(what: str) -> Iterator[None]:
    """Imports in this block raise MissingExtra for a package of an extra."""
    try:
        yield
    except ImportError as error:
        raise missing(what, error) from None


class Lazy(ModuleType):
    """A module that is imported when something of it is first used. Raises MissingExtra, beginning
    with `user`, if a package of an extra is not there.
    """

    def __init__(self, name: str, user: str) -> None:
        super().__init__(name)
        self._user = user

    def __getattr__(self, name: str) -> Any:
        with needed_by(self._user):
            value = getattr(import_module(self.__name__), name)
        setattr(self, name, value)  # the next access does not come here
        return value


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
            value = getattr(import_module(homes[name]), name)
        except ImportError as error:
            raise missing(name, error) from None
        setattr(sys.modules[package], name, value)  # the next access does not come here
        return value

    names = sorted(homes)
    return load, names.copy, names


def absent(parts: Mapping[str, bool]) -> str | None:
    """`missing: A; B.`, of parts that are there or not; None if all are."""
    names = [name for name, present in parts.items() if not present]
    return f"missing: {'; '.join(names)}." if names else None


def ascend_parts() -> dict[str, bool]:
    """What an Ascend NPU needs, and whether it is here; found without importing its package."""
    home = os.environ.get("ASCEND_HOME_PATH")
    cann = home is not None and (Path(home) / "lib64" / "libascendcl.so").exists()
    torch_npu = None
    with suppress(ImportError):  # an import hook may forbid it
        torch_npu = find_spec("torch_npu")
    return {
        "an NPU with its driver (/dev/davinci_manager)": Path("/dev/davinci_manager").exists(),
        "CANN (ASCEND_HOME_PATH with libascendcl.so: source its set_env.sh)": cann,
        f"torch_npu ({install('npu')})": torch_npu is not None,
    }
