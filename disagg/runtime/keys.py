"""Key files of a deployment: an authority of its own, and a private key with its certificate for
each side.

The folder (`kvpool keys FOLDER`) holds `ca.key` and `ca.pem`, and for each side a file to be copied
to its hosts: `prefill.pem` and `decode.pem` with the side's private key, its certificate, and the
authority's. `ca.key` stays where it is: it can make certificates of either side.
"""

from __future__ import annotations

import os
import secrets
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from disagg.host.trusted_files import open_folder, read_in_folder, write_file
from disagg.runtime.sockets.tls import USAGES, Side
from kvpool.extras import needed_by

SIDE_DAYS = 365


class KeyFile(NamedTuple):
    """A side's file, the SHA-256 of its certificate, and when that expires."""

    side: Side
    path: Path
    fingerprint: str
    expires: datetime


def write_keys(
    path: str | os.PathLike[str], days: float = SIDE_DAYS, *, renew: bool = False
) -> list[KeyFile]:
    """Makes an authority and the files of both sides, valid for `days`, in a new folder that only
    its owner may open. With `renew`, replaces both sides' files in such a folder by new ones of its
    authority. Raises OSError, ValueError for another folder, MissingExtra without cryptography.
    """
    with needed_by("kvpool keys"):
        from disagg.runtime.certificates import issue, new_authority, read_authority
    place = Path(path)
    if not renew:
        place.mkdir(0o700)
    folder, files = open_folder(place), []
    try:
        if renew:
            key, certificate = (read_in_folder(folder, place / n) for n in ("ca.key", "ca.pem"))
            authority = read_authority(key, certificate, str(place))
        else:
            authority = new_authority()
            write_file(folder, "ca.key", authority.key_pem, 0o600)
            write_file(folder, "ca.pem", authority.pem, 0o600)
        for side in USAGES:
            pem, fingerprint, expires = issue(authority, side, days)
            name, new = f"{side}.pem", f".{side}.{secrets.token_hex(4)}"
            write_file(folder, new, pem, 0o600)
            # whole or not at all: an endpoint may read it at any time
            os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)
            files.append(KeyFile(side, place / name, fingerprint, expires))
    finally:
        os.close(folder)
    return files
