"""The machine, versions and date that figures belong to."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

import torch

from disagg.cli.doctor import versions
from kvpool.device import Device

DRIVERS = {
    "cuda": Path("/proc/driver/nvidia/version"),
    "npu": Path("/usr/local/Ascend/driver/version.info"),
}
NVIDIA_DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def machine(device: Device) -> dict[str, str]:
    """The device's name and driver, and the host and its load."""
    kind = device.allocate(1).device
    facts = {"device": device.name, "name": _cpu()}
    if kind.type != "cpu":
        name_of = getattr(torch.get_device_module(kind), "get_device_name", str)
        facts["name"] = name_of(kind)
        facts["driver"] = _first_line(DRIVERS.get(kind.type))
        facts["host"] = _cpu()
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    facts["system"] = f"{platform.system()} {platform.release()}"
    facts["cores"] = str(os.cpu_count())
    facts["threads"] = "1"
    facts["load before"] = load
    return facts


def detailed(device: Device) -> dict[str, str]:
    """The same, the device's properties, and what torch was built for."""
    details, kind = machine(device), device.allocate(1).device
    if kind.type != "cpu":
        # containers have no /proc of the driver
        if kind.type == "cuda" and details.get("driver") == "unknown":
            details["driver"] = _printed(*NVIDIA_DRIVER) or "unknown"
        module = torch.get_device_module(kind)
        if hasattr(module, "get_device_properties"):
            details["properties"] = str(module.get_device_properties(kind))
    if torch.version.cuda:
        details["torch built for CUDA"] = torch.version.cuda
    return details


def commit() -> str | None:
    """The commit that this code was checked out from, and whether files differ from it; None for
    an installed package.
    """
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    head = _printed("git", "-C", str(root), "rev-parse", "HEAD")
    changed = _printed("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return f"{head}{', with changes' if changed else ''}" if head else None


def packages() -> dict[str, str]:
    """Versions of the installed packages that affect figures."""
    return {name: number for name, number in versions().items() if number != "-"}


def now() -> str:
    """Date and time, UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def one_line(facts: Mapping[str, str]) -> str:
    """One line of names and values."""
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{named[0] if named else platform.processor()} ({platform.machine()})"


def _printed(*command: str) -> str:
    """What a command prints, or nothing if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _first_line(path: Path | None) -> str:
    try:
        return path.read_text().splitlines()[0].strip() if path else "unknown"
    except (OSError, IndexError):
        return "unknown"
