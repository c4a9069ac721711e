"""The machine, versions and source that figures belong to."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch

from disagg.cli.doctor import versions
from kvpool.device import Device

NPU_DRIVER = Path("/usr/local/Ascend/driver/version.info")
NVIDIA_DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def machine(device: Device) -> dict[str, str]:
    """The device's name, driver and properties, what torch was built for, and the host and its
    load.
    """
    kind, host = device.allocate(1).device, _cpu()
    facts = {"device": device.name, "name": host}
    if kind.type != "cpu":
        module = torch.get_device_module(kind)
        facts["name"] = getattr(module, "get_device_name", str)(kind)
        if hasattr(module, "get_device_properties"):
            facts["properties"] = str(module.get_device_properties(kind))
        # by the command, since containers have no /proc of the driver
        driver = _printed(*NVIDIA_DRIVER) if kind.type == "cuda" else _first_line(NPU_DRIVER)
        facts["driver"] = driver or "unknown"
        facts["host"] = host
    if torch.version.cuda:
        facts["torch built for CUDA"] = torch.version.cuda
    facts["system"] = f"{platform.system()} {platform.release()}"
    facts["cores"] = str(os.cpu_count())
    facts["threads"] = "1"
    facts["load before"] = f"{os.getloadavg()[0]:.1f}"
    return facts


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


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()} ({platform.machine()})"


def _printed(*command: str) -> str:
    """What a command prints, or nothing if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _first_line(path: Path) -> str:
    try:
        return path.read_text().splitlines()[0].strip()
    except (OSError, IndexError):
        return ""
