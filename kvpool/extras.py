"""Packages that only some parts need. Where one is not installed, MissingExtra has the command:
`MHAPool needs PyTorch: pip install 'kvpool[torch]'`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

EXTRAS = {
    "cryptography": ("cryptography", "keys"),
    "prometheus_client": ("prometheus-client", "metrics"),
    "rich": ("rich", "cli"),
    "torch": ("PyTorch", "torch"),
    "transformers": ("transformers", "demo"),
    "triton": ("Triton", "cuda"),
    "typer": ("typer", "cli"),
}
"""By imported package: its name for a reader, and the extra of kvpool that installs it."""


class MissingExtra(ModuleNotFoundError):
    """A package of an optional part is not installed; the message has the command."""


def install(extra: str) -> str:
    """The command that adds an extra to the installed kvpool. pip keeps what is installed, wherever
    it came from, and asks an index only for the packages that the extra names.
    """
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
