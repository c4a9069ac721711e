"""Unix sockets between processes of one host: their paths, and the process at the other end. They
are in a folder that only this user can open. A process holds a lock file there while it lives, so
that another one removes what a killed process has left.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import stat
import struct
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

MAX_PATH = 107
"""Bytes of a socket's path that Linux takes."""
_UCRED = struct.Struct("iII")


class Credentials(NamedTuple):
    """A process as the kernel names it. `pid` is 0 if it is in a process namespace out of sight."""

    pid: int
    uid: int

    @property
    def trusted(self) -> bool:
        """Whether it runs as this process's user, or as root."""
        return self.uid in (os.geteuid(), 0)


_own: tuple[int, Path] | None = None
"""This process, and what its names begin with in the folder while its lock file is open."""
_guard = threading.Lock()


def peer_credentials(connection: socket.socket) -> Credentials:
    """The process that made the other end: of a dialled connection, the listener."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(data)
    return Credentials(pid, uid)


def new_path() -> Path:
    """A new path for a socket of this process. Raises OSError if no folder for it is safe."""
    global _own
    with _guard:
        if _own is None or _own[0] != os.getpid():
            _own = os.getpid(), _claim(private_folder())
        path = Path(f"{_own[1]}.{secrets.token_hex(4)}")
    if len(os.fsencode(path)) > MAX_PATH:
        raise OSError(
            f"{path}: longer than the {MAX_PATH} bytes of a socket's path. Set XDG_RUNTIME_DIR to "
            "a folder with a shorter name."
        )
    return path


def private_folder() -> Path:
    """The folder of this user's sockets. Raises PermissionError if others may open it."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and _is_private(Path(runtime)):
        folder = Path(runtime) / "kvpool"
    else:
        folder = Path(tempfile.gettempdir()) / f"kvpool-{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not _is_private(folder):
        raise PermissionError(
            f"{folder}: not a folder that only user {os.geteuid()} owns and may open. Remove it, "
            "or set XDG_RUNTIME_DIR to one."
        )
    return folder


def _is_private(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    shared = status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not shared


def _claim(folder: Path) -> Path:
    """What this process's names in the folder begin with. What dead processes left is removed."""
    flags = os.O_RDWR | os.O_CLOEXEC
    for lock in folder.glob("*.lock"):
        with suppress(OSError), os.fdopen(os.open(lock, flags | os.O_NOFOLLOW), "rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not held: its process ended
            for path in folder.glob(f"{lock.stem}.*"):
                path.unlink(missing_ok=True)
    while True:
        prefix = folder / secrets.token_hex(4)
        path = prefix.with_suffix(".lock")
        handle = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return prefix
        os.close(handle)  # another process has taken it for one that was left
