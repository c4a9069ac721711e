"""Key files of a deployment: an authority of its own, and a private key with its certificate for
each side.

The folder (`kvpool keys FOLDER`) holds `ca.key` and `ca.pem`, and for each side a file to be copied
to its hosts: `prefill.pem` and `decode.pem` with the side's private key, its certificate, and the
authority's. `ca.key` stays where it is: it can make certificates of either side.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from disagg.host.trusted_files import open_folder, read_in_folder, write_file
from disagg.runtime.sockets.credentials import USAGES, Side
from kvpool.extras import needed_by

if TYPE_CHECKING:
    from disagg.runtime.certificates import Authority

SIDE_DAYS = 365


class KeyFile(NamedTuple):
    """A side's file, the SHA-256 of its certificate, and when that expires."""

    side: Side
    path: Path
    fingerprint: str
    expires: datetime


def write_keys(path: str | os.PathLike[str], days: float = SIDE_DAYS) -> list[KeyFile]:
    """Makes an authority and the files of both sides, valid for `days`, in a new folder that only
    its owner may open. Raises OSError, and MissingExtra without package cryptography.
    """
    with needed_by("kvpool keys"):
        from disagg.runtime.certificates import new_authority

    def make(folder: int) -> Authority:
        authority = new_authority()
        write_file(folder, "ca.key", authority.key_pem, 0o600)
        write_file(folder, "ca.pem", authority.pem, 0o600)
        return authority

    os.mkdir(path, 0o700)
    return _issue(Path(path), make, days)


def renew_keys(path: str | os.PathLike[str], days: float = SIDE_DAYS) -> list[KeyFile]:
    """Replaces the files of both sides in a folder of `write_keys` by new ones of its authority.
    Raises OSError, ValueError for other files, and MissingExtra as `write_keys` does.
    """
    with needed_by("kvpool keys"):
        from disagg.runtime.certificates import read_authority

    def read(folder: int) -> Authority:
        files = [read_in_folder(folder, Path(path) / name) for name in ("ca.key", "ca.pem")]
        try:
            return read_authority(*files)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: ca.key or ca.pem: {error}.") from None

    return _issue(Path(path), read, days)


def _issue(path: Path, authority: Callable[[int], Authority], days: float) -> list[KeyFile]:
    """Writes each side's file, whole or not at all: an endpoint may read it at any time."""
    from disagg.runtime.certificates import issue

    folder, files = open_folder(path), []
    try:
        signer = authority(folder)
        for side in USAGES:
            pem, fingerprint, expires = issue(signer, side, days)
            name, new = f"{side}.pem", f".{side}.{secrets.token_hex(4)}"
            write_file(folder, new, pem, 0o600)
            os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)
            files.append(KeyFile(side, path / name, fingerprint, expires))
    finally:
        os.close(folder)
    return files
