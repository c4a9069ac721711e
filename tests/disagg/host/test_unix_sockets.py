"""Where sockets lie, who may open them, and what a killed process leaves."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

from disagg.host import unix_sockets

LEAVE = """
import os, signal, socket
from disagg.host.unix_sockets import new_path
one = socket.socket(socket.AF_UNIX)
one.bind(str(new_path()))
print("there", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A runtime folder of this test, and no share of an earlier one."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(unix_sockets, "_own", None)
    return tmp_path / "kvpool"


def test_the_folder_is_the_users_alone_and_no_link(folder, tmp_path):
    path = unix_sockets.new_path()
    assert path.parent == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    refused = r"kvpool: not a folder that only user \d+ owns"
    with pytest.raises(PermissionError, match=refused):
        unix_sockets.private_folder()
    folder.chmod(0o700)
    elsewhere = folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(elsewhere)
    with pytest.raises(PermissionError, match=refused):
        unix_sockets.private_folder()


def test_a_runtime_folder_that_others_may_open_is_not_used(folder, tmp_path, monkeypatch):
    tmp_path.chmod(0o755)
    spare = tmp_path / "tmp"
    spare.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(spare))
    assert unix_sockets.new_path().parent == spare / f"kvpool-{os.geteuid()}"


def test_a_path_that_is_too_long_says_so(folder, tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 100)
    deep.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    with pytest.raises(OSError, match="longer than the 107 bytes"):
        unix_sockets.new_path()


def test_what_a_killed_process_left_is_removed_and_what_a_live_one_has_stays(folder):
    ours = unix_sockets.new_path()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(ours))
    ended = subprocess.run([sys.executable, "-c", LEAVE], stdout=subprocess.PIPE, check=False)
    assert ended.returncode == -signal.SIGKILL
    left = {path for path in folder.iterdir() if not path.name.startswith(ours.name[:8])}
    assert len(left) == 2  # its lock and its socket
    look = "from disagg.host.unix_sockets import new_path; new_path()"
    subprocess.run([sys.executable, "-c", look], check=True)
    assert not left & set(folder.iterdir())
    assert ours.exists()
    listener.close()


def test_the_kernel_names_the_peer():
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        peer = unix_sockets.peer_credentials(one)
    assert peer == (os.getpid(), os.geteuid())
    assert peer.trusted
    assert not peer._replace(uid=os.geteuid() + 1).trusted
    assert peer._replace(uid=0).trusted
