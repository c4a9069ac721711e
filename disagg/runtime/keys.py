"""Keys of a deployment: with them, messages are encrypted and only holders of the file connect.

One file for all endpoints (`kvpool keys FILE`): a CURVE key pair of ZeroMQ. Every holder may dial
and may be dialled.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import zmq


class Keys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pair of Curve25519 keys, each 32 bytes as 40 characters of Z85."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"Keys({self.public})"


def read_keys(path: str | os.PathLike[str]) -> Keys:
    """The keys of a file; raises ValueError if it is no key file, or if other users may read it."""
    file = Path(path)
    try:
        mode, data = file.stat().st_mode, file.read_bytes()
    except OSError as error:
        raise ValueError(f"keys {file}: {error.strerror}. Make it: kvpool keys {file}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(f"keys {file}: other users may open it. Run: chmod 600 {file}")
    try:
        keys = msgspec.json.decode(data, type=Keys)
        paired = zmq.curve_public(keys.secret.encode()) == keys.public.encode()
    except (msgspec.MsgspecError, zmq.ZMQError, ValueError) as error:
        raise ValueError(f"keys {file}: {error}. Make it anew: kvpool keys {file}") from None
    if not paired:
        raise ValueError(
            f"keys {file}: the two keys are not a pair. Make it anew: kvpool keys {file}"
        )
    return keys


def write_keys(path: str | os.PathLike[str]) -> Keys:
    """Makes a pair, in a new file that only its owner may open."""
    public, secret = zmq.curve_keypair()
    keys = Keys(public.decode(), secret.decode())
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(msgspec.json.encode(keys))
    return keys
