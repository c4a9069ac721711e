"""The machine, versions and date that figures belong to."""

from __future__ import annotations

import os
import platform
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


def machine(device: Device) -> dict[str, str]:
    """The device's name and driver, and the host and its load."""
    kind = device.allocate(1).device
    found = {"device": device.name, "name": _cpu()}
    if kind.type != "cpu":
        name_of = getattr(torch.get_device_module(kind), "get_device_name", str)
        found["name"] = name_of(kind)
        found["driver"] = _first_line(DRIVERS.get(kind.type))
        found["host"] = _cpu()
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    found["system"] = f"{platform.system()} {platform.release()}"
    found["cores"] = str(os.cpu_count())
    found["threads"] = "1"
    found["load before"] = load
    return found


def packages() -> dict[str, str]:
    """Versions of the installed packages that affect figures."""
    return {name: number for name, number in versions().items() if number != "-"}


def now() -> str:
    """Date and time, UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def one_line(found: Mapping[str, str]) -> str:
    """One line of names and values."""
    return ", ".join(f"{name} {value}" for name, value in found.items())


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{named[0] if named else platform.processor()} ({platform.machine()})"


def _first_line(path: Path | None) -> str:
    try:
        return path.read_text().splitlines()[0].strip() if path else "unknown"
    except (OSError, IndexError):
        return "unknown"
