"""Files that a process believes: read only if nobody but its own user and root can have written
them. Checked on what was opened, which cannot change under the check; no symbolic link is followed.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

WRITE = stat.S_IWGRP | stat.S_IWOTH
ANY = stat.S_IRWXG | stat.S_IRWXO
MAX_BYTES = 64 << 10


def open_folder(path: Path) -> int:
    """Opens a folder that nobody else can write to. Raises FileNotFoundError, ValueError."""
    return _open(path, path, os.O_DIRECTORY, None, WRITE)


def read_file(folder: int, path: Path, refused: int = WRITE) -> bytes:
    """The content, 64 KiB at most, of the file of `path`'s name in an open folder. Other users must
    have none of the permissions `refused`. Raises FileNotFoundError, ValueError.
    """
    file = _open(path, path.name, os.O_NONBLOCK, folder, refused)
    with os.fdopen(file, "rb") as opened:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ValueError(f"{path}: no regular file. Remove it.")
        return opened.read(MAX_BYTES)


def write_file(folder: int, name: str, data: bytes, mode: int) -> None:
    """Writes a new file in an open folder. Raises FileExistsError, also for a symbolic link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, mode, dir_fd=folder), "wb") as file:
        file.write(data)


def _open(path: Path, name: str | Path, flags: int, folder: int | None, refused: int) -> int:
    flags |= os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        handle = os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and path.is_symlink():
            raise ValueError(
                f"{path}: a symbolic link is not followed. Name what it points to."
            ) from None
        raise ValueError(f"{path}: {error.strerror}.") from None
    try:
        _check(path, os.fstat(handle), refused)
    except ValueError:
        os.close(handle)
        raise
    return handle


def _check(path: Path, status: os.stat_result, refused: int) -> None:
    user, mode = os.geteuid(), stat.S_IMODE(status.st_mode)
    what = f"{path}: user {status.st_uid} owns it, its mode is {mode:04o}"
    if status.st_uid not in (user, 0):
        raise ValueError(
            f"{what}; this process believes files of its own user {user} and of root only. "
            f"Run: chown {user} {path}"
        )
    if mode & refused:
        verb, cure = ("open", "go-rwx") if refused == ANY else ("write to", "go-w")
        raise ValueError(f"{what}: other users may {verb} it. Run: chmod {cure} {path}")
