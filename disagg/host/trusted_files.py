"""Files that a process believes: read only if no one but its own user and root can have written
them. What was opened is checked, which cannot change under the check.
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
    """Opens a folder that no other user can write to. Raises FileNotFoundError, ValueError."""
    return _open(path, path, os.O_DIRECTORY | os.O_NOFOLLOW, None, WRITE)


def read_in_folder(folder: int, path: Path) -> bytes:
    """The private file of `path`'s name in an open folder; a symbolic link is not followed."""
    return _read(path, _open(path, path.name, os.O_NONBLOCK | os.O_NOFOLLOW, folder, ANY))


def read_file(path: Path, refused: int) -> bytes:
    """The content of a file, 64 KiB at most. Other users must have none of the permissions
    `refused`. Raises FileNotFoundError, ValueError.
    """
    return _read(path, _open(path, path, os.O_NONBLOCK, None, refused))


def write_file(folder: int, name: str, data: bytes, mode: int) -> None:
    """Writes a new file in an open folder. Raises FileExistsError, also for a symbolic link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, mode, dir_fd=folder), "wb") as file:
        file.write(data)


def _read(path: Path, descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path}: no regular file. Remove it.")
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"{path}: more than {MAX_BYTES:,} bytes.")
    return data


def _open(path: Path, name: str | Path, flags: int, folder: int | None, refused: int) -> int:
    try:
        descriptor = os.open(name, flags | os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError as error:
        raise FileNotFoundError(error.errno, error.strerror, str(path)) from None
    except OSError as error:
        reason = error.strerror
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and path.is_symlink():
            reason = "a symbolic link is not followed. Name what it points to"
        raise ValueError(f"{path}: {reason}.") from None
    status, user = os.fstat(descriptor), os.geteuid()
    mode, reason = stat.S_IMODE(status.st_mode), ""
    if status.st_uid not in (user, 0):
        reason = (
            f"; this process believes files of its own user {user} and of root only. "
            f"Run: chown {user} {path}"
        )
    elif mode & refused:
        verb, cure = ("open", "go-rwx") if refused == ANY else ("write to", "go-w")
        reason = f": other users may {verb} it. Run: chmod {cure} {path}"
    if reason:
        os.close(descriptor)
        raise ValueError(f"{path}: user {status.st_uid} owns it, its mode is {mode:04o}{reason}")
    return descriptor
