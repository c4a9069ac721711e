"""The machine, versions and source that figures belong to."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import torch

from disagg.cli.doctor import versions
from kvpool.device import Device


def machine(device: Device) -> dict[str, str]:
    """The device's name and properties, what torch was built for, and the host and its load."""
    memory, host = device.allocate(1).device, _cpu()
    facts = {"device": device.name, "name": host}
    if memory.type != "cpu":
        module = torch.get_device_module(memory)
        facts["name"] = getattr(module, "get_device_name", str)(memory)
        if hasattr(module, "get_device_properties"):
            facts["properties"] = str(module.get_device_properties(memory))
        facts["host"] = host
    if torch.version.cuda:
        facts["torch built for CUDA"] = torch.version.cuda
    facts["system"] = f"{platform.system()} {platform.release()}"
    facts["cores"] = str(os.cpu_count())
    facts["threads"] = "1"
    facts["load before"] = f"{os.getloadavg()[0]:.1f}"
    return facts


def commit() -> str | None:
    """The commit that this code was checked out from, with `-dirty` where files differ from it;
    None for an installed package.
    """
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        return subprocess.check_output(command, cwd=root, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def packages() -> dict[str, str]:
    """Versions of the installed packages that affect figures."""
    return {name: number for name, number in versions().items() if number != "-"}


def utc_now() -> str:
    """Date and time."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _cpu() -> str:
    model = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.M)
    return f"{model[1] if model else 'processor'} ({platform.machine()})"
