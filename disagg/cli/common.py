"""What several commands share: options refused, a bar of what runs, and where figures are from."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from disagg.cli.doctor import versions

if TYPE_CHECKING:
    from rich.console import Console

    from kvpool.device import Device


def need_known(option: str, values: Collection[str], choices: Collection[str]) -> None:
    """Raises typer.BadParameter for a value of an option that is none of `choices`."""
    from kvpool.layout.text import nearest

    for value in values:
        if value not in choices:
            names = ", ".join(choices)
            raise typer.BadParameter(f"{option} {value}: one of {names}.{nearest(value, choices)}")


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
def progress_bar(console: Console, total: int) -> Iterator[Callable[[str, int], None]]:
    """Yields `tell(what, done)`, which shows what runs, and that `done` of `total` have ended."""
    from rich.progress import Progress

    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        yield lambda what, done: progress.update(task, description=what, completed=done)


def origin(device: Device) -> dict[str, Any]:
    """Of a report: `machine`, `versions` of packages that affect figures, and `date` (UTC)."""
    installed = {name: number for name, number in versions().items() if number != "-"}
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"machine": machine(device), "versions": installed, "date": now}


def machine(device: Device) -> dict[str, str]:
    """The device's name and properties, what torch was built for, and the host and its load."""
    import torch

    model = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.M)
    host = f"{model[1] if model else 'processor'} ({platform.machine()})"
    memory = device.allocate(1).device
    facts = {"device": device.name, "name": host}
    if memory.type != "cpu":
        module = torch.get_device_module(memory)
        facts["name"] = getattr(module, "get_device_name", str)(memory)
        if hasattr(module, "get_device_properties"):
            facts["properties"] = str(module.get_device_properties(memory))
        facts["host"] = host
    if torch.version.cuda:
        facts["torch built for CUDA"] = torch.version.cuda
    facts |= {"system": f"{platform.system()} {platform.release()}", "cores": str(os.cpu_count())}
    return facts | {"threads": "1", "load before": f"{os.getloadavg()[0]:.1f}"}


def commit() -> str | None:
    """The commit of this code, `-dirty` if files differ from it; None for an installed package."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        return subprocess.check_output(command, cwd=root, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return None
