"""`kvpool doctor`: which devices and engines work here, and why others do not."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Annotated

import typer

from kvpool import _native
from kvpool.cli import absent, offered_by

PACKAGES = (
    "kvpool", "torch", "numpy", "cryptography", "triton", "torch-npu", "nixl-cu12", "nixl-cu13",
    "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-non-cuda", "amd-mori", "transformers",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Availability:
    """What is installed. `problem` is None if it works; `broken`: it cannot be loaded or asked."""

    kind: str
    name: str
    offered_by: str
    problem: str | None
    broken: bool = False


def availabilities() -> list[Availability]:
    """Every installed device, engine and command, and what is done outside Python."""
    return [
        *_check("device", "kvpool.devices", lambda offered, name: offered(name).availability()),
        *_check("engine", "disagg.engines", lambda offered, _: offered.availability()),
        Availability("helper", "native copies", "kvpool", _native.availability()),
        *_check("command", "kvpool.commands", lambda offered, _: None),
    ]


def _check(kind: str, group: str, ask: Callable[..., str | None]) -> Iterator[Availability]:
    for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
        broken = False
        try:
            problem = ask(entry.load(), entry.name)
        except Exception as error:  # a vendor's error must not hide the others
            needs = absent(entry, error)
            broken, problem = not needs, needs or f"{type(error).__name__}: {error}"
        yield Availability(
            kind=kind, name=entry.name, offered_by=offered_by(entry), problem=problem, broken=broken
        )


def versions() -> dict[str, str]:
    """Versions of the relevant packages; `-` for those that are not installed."""
    numbers = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            numbers[package] = version(package)
        except PackageNotFoundError:
            numbers[package] = "-"
    return numbers


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List which devices, engines and helpers work here.

    And why others do not: "not here" is optional and missing, "broken" is installed and cannot be
    loaded. Commands are listed where they are not there or broken.

    Exit status 1 if something is broken, or no device or no engine works.

    JSON: versions; found (kind, name, offered_by, problem, broken), commands too.

    \b
    Example:
      kvpool doctor --json
    """
    offers, packages = availabilities(), versions()
    if as_json:
        typer.echo(json.dumps({"versions": packages, "found": [asdict(offer) for offer in offers]}))
    else:
        _print(offers, packages)
    works = {offer.kind for offer in offers if offer.problem is None}
    lacking = [kind for kind in ("device", "engine") if kind not in works]
    for kind in lacking:
        typer.echo(f"no {kind} works here.", err=True)
    if lacking or any(offer.broken for offer in offers):
        raise typer.Exit(1)


def _print(offers: Sequence[Availability], packages: dict[str, str]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.text import Text

    from kvpool.render.table import FittedTable

    table = FittedTable()
    for name in ("", "name", "here"):
        table.add_column(name, no_wrap=True)
    table.add_column("why not", overflow="fold")
    for offer in offers:
        if offer.kind == "command" and offer.problem is None:
            continue
        package = "" if offer.offered_by == "kvpool" else f"of package {offer.offered_by}. "
        state = Text("works", "green") if offer.problem is None else Text("not here")
        if offer.broken:
            state = Text("broken", "red")
        why_not = escape(package + (offer.problem or ""))
        table.add_row(offer.kind, escape(offer.name), state, why_not)
    console = Console()
    console.print(table, crop=False)
    installed = " ".join(f"{name}=={number}" for name, number in packages.items() if number != "-")
    absent = ", ".join(name for name, number in packages.items() if number == "-")
    console.print(f"installed: {installed}", highlight=False, markup=False)
    if absent:
        console.print(f"optional, not installed: {absent}", highlight=False, markup=False)
