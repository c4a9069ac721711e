"""`kvpool doctor`: which devices and engines work here, and why others do not."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Annotated

import typer

from disagg.plan import native
from kvpool import _native

PACKAGES = (
    "kvpool",
    "torch",
    "numpy",
    "pyzmq",
    "triton",
    "torch-npu",
    "nixl-cu12",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-non-cuda",
    "amd-mori",
    "transformers",
)


@dataclass(frozen=True, slots=True)
class Availability:
    """An installed device, engine or helper; `problem` is None if it works here."""

    kind: str
    name: str
    offered_by: str
    problem: str | None


def availabilities() -> list[Availability]:
    """Every installed device and engine, and what is done outside Python."""
    return [
        *_check("device", "kvpool.devices", lambda found, name: found(name).availability()),
        *_check("engine", "disagg.engines", lambda found, _: found.availability()),
        Availability("helper", "native copies", "kvpool", _native.availability()),
        Availability("helper", "native binding", "kvpool", native.availability()),
    ]


def _check(kind: str, group: str, ask: Callable[..., str | None]) -> Iterator[Availability]:
    for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
        offered_by = entry.dist.name if entry.dist else entry.module
        try:
            problem = ask(entry.load(), entry.name)
        except Exception as error:  # a vendor's error must not hide the others
            problem = f"{type(error).__name__}: {error}"
        yield Availability(kind, entry.name, offered_by, problem)


def versions() -> dict[str, str]:
    """Versions of the relevant packages; `-` for those that are not installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "-"
    return found


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """List which devices, engines and helpers work here, and why others do not.

    Exit status 1 if no device or no engine works.
    """
    found, packages = availabilities(), versions()
    if as_json:
        typer.echo(json.dumps({"versions": packages, "found": [asdict(each) for each in found]}))
    else:
        _print(found, packages)
    works = {each.kind for each in found if each.problem is None}
    if not works >= {"device", "engine"}:
        raise typer.Exit(1)


def _print(found: list[Availability], packages: dict[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("", "name", "works here", "offered by")
    for each in found:
        verdict = Text("yes", "green") if each.problem is None else Text(each.problem, "red")
        table.add_row(each.kind, each.name, verdict, each.offered_by)
    table.caption = ", ".join(f"{name} {number}" for name, number in packages.items())
    Console().print(table)
