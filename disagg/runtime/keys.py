"""Keys of a deployment: with them, messages are encrypted, and each side talks to the other only.

A folder (`kvpool keys FOLDER`) with one file for each side: its own CURVE key pair of ZeroMQ, and
the other side's public key. Who holds decode's file can dial prefills, and cannot pose as one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import zmq

from disagg.host.trusted_files import ANY, open_folder, read_file, write_file

Side = Literal["prefill", "decode"]
Key = Annotated[str, msgspec.Meta(min_length=40, max_length=40)]
"""32 bytes of Curve25519 as Z85."""


class Keys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The pair of one side, and the public key of the `other`."""

    side: Side
    public: Key
    secret: Key
    other: Key

    def __repr__(self) -> str:
        return f"Keys({self.side} {self.public})"


def read_keys(path: str | os.PathLike[str], side: Side) -> Keys:
    """The keys of a side, from its file or the folder of both. Raises ValueError for a file of the
    other side, for what is no key file, and for a file that another user owns or may open.
    """
    given = Path(path)
    file = given / f"{side}.key" if os.path.isdir(given) else given
    try:
        folder = open_folder(file.parent)
        try:
            data = read_file(folder, file, ANY)
        finally:
            os.close(folder)
    except FileNotFoundError as error:
        raise ValueError(f"keys {file}: {error.strerror}. Make it: kvpool keys FOLDER") from None
    except ValueError as error:
        raise ValueError(f"keys {error}") from None
    try:
        keys = msgspec.json.decode(data, type=Keys)
        paired = zmq.curve_public(keys.secret.encode()) == keys.public.encode()
    except (msgspec.MsgspecError, zmq.ZMQError, ValueError) as error:
        raise ValueError(f"keys {file}: {error}. Make it anew: kvpool keys FOLDER") from None
    if not paired:
        raise ValueError(f"keys {file}: no pair. Make it anew: kvpool keys FOLDER")
    if keys.side != side:
        raise ValueError(f"keys {file}: {keys.side}'s, and this is {side}. Give it {side}.key.")
    return keys


def write_keys(path: str | os.PathLike[str]) -> tuple[Keys, Keys]:
    """Makes prefill's and decode's keys, in a new folder that only its owner may open. Raises
    OSError.
    """
    (public, secret), (other_public, other_secret) = (
        (pair[0].decode(), pair[1].decode()) for pair in (zmq.curve_keypair(), zmq.curve_keypair())
    )
    made = (
        Keys("prefill", public, secret, other_public),
        Keys("decode", other_public, other_secret, public),
    )
    os.mkdir(path, 0o700)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for keys in made:
            write_file(folder, f"{keys.side}.key", msgspec.json.encode(keys), 0o600)
    finally:
        os.close(folder)
    return made
