"""What several commands have in common: options that are refused, and a bar that says what runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from kvpool.device import Device


def need_known(option: str, values: Collection[str], known: Collection[str]) -> None:
    """Raises typer.BadParameter for a value of an option that is not known."""
    from kvpool.layout.sentences import nearest

    for value in values:
        if value not in known:
            names = ", ".join(known)
            raise typer.BadParameter(f"{option} {value}: one of {names}.{nearest(value, known)}")


def device_to_measure(name: str) -> Device:
    """The device by name. Raises typer.BadParameter if it is missing or has no memory."""
    from kvpool.device import DeviceUnavailable, get_device

    try:
        device = get_device(name)
    except DeviceUnavailable as error:
        raise typer.BadParameter(str(error)) from None
    if device.memory_kind == "meta":
        raise typer.BadParameter(
            f"device {name!r} has no memory to measure. Choose a device with memory, such as cpu."
        )
    return device


@contextmanager
def progress_bar(console: Console, total: int) -> Iterator[Callable[..., Any]]:
    """Yields `tell(what)`, which shows what runs; with `advance=1` one of `total` has ended."""
    from rich.progress import Progress

    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        yield lambda what, advance=0: progress.update(task, description=what, advance=advance)
