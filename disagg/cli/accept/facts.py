"""The machine, the packages and the commit that a report belongs to."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch

from disagg.cli.bench.machine import machine
from kvpool.device import Device

NVIDIA_DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def facts(device: Device) -> dict[str, str]:
    """What `kvpool bench` says of the machine, the device's properties, and what torch was built
    for.
    """
    found, kind = machine(device), device.allocate(1).device
    if kind.type != "cpu":
        if kind.type == "cuda" and found.get("driver") == "unknown":  # no /proc of it in containers
            found["driver"] = _said(*NVIDIA_DRIVER) or "unknown"
        module = torch.get_device_module(kind)
        if hasattr(module, "get_device_properties"):
            found["properties"] = str(module.get_device_properties(kind))
    if torch.version.cuda:
        found["torch built for CUDA"] = torch.version.cuda
    return found


def commit() -> str | None:
    """The commit that this code was checked out from, and whether files differ from it; None for
    an installed package.
    """
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    found = _said("git", "-C", str(root), "rev-parse", "HEAD")
    if not found:
        return None
    changed = _said("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return f"{found}{', with changes' if changed else ''}"


def _said(*command: str) -> str:
    """What a command prints, or nothing if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
