"""What `record.py` has written of a release, by its number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from disagg.protocol.versions import PROTOCOL, spoken

FOLDER = Path(__file__).parent / "golden"
SPOKEN = list(spoken(PROTOCOL))


def golden(number: int) -> dict[str, Any]:
    file = FOLDER / f"{number}.json"
    assert file.exists(), (
        f"protocol {number} has no bytes in tests/compat/golden: record.py writes them, with the "
        "code that speaks it first."
    )
    return json.loads(file.read_text())


def frames(number: int, way: str) -> list[bytes]:
    """What one side sent: decode `up`, prefill `down`."""
    steps = golden(number)["conversation"]["steps"]
    return [bytes.fromhex(step[1]) for step in steps if step[0] == way]


def fields_of(frame: bytes) -> dict[str, Any]:
    """A frame as any reader of msgpack sees it."""
    return msgspec.msgpack.decode(frame)


def keys_of(number: int) -> dict[str, set[str]]:
    """The fields of each message of a number, by its tag, and of a `space` of its layouts."""
    recorded, keys = golden(number), dict[str, set[str]]()
    for message in recorded["messages"].values():
        fields = fields_of(bytes.fromhex(message["bytes"]))
        keys.setdefault(fields["type"], set()).update(fields)
    layouts = recorded["layouts"].values()
    keys["space"] = {
        name
        for layout in layouts
        for space in fields_of(bytes.fromhex(layout["bytes"]))["spaces"]
        for name in space
    }
    return keys
