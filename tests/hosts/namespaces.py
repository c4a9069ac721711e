"""A host of the tests: network, process, mount, IPC and UTS namespaces that live as long as one
process does. The kernel removes all that is in them with that process, and it ends with this one,
however this one ends.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).parents[2]
PR_SET_PDEATHSIG = 1
SECONDS = 180.0
"""For one command: while engines start on all cores, one has taken more than 30."""
NEEDED = (
    "Tests of hosts need root, iproute2, util-linux and a kernel that gives this process new "
    "network, process, mount, IPC and UTS namespaces: run them as root of the machine or of a "
    "privileged container (docker run --privileged)"
)


class Refused(RuntimeError):
    """This machine gives no namespaces, or no links between them."""


def called(command: Sequence[str]) -> str:
    """What a command prints. Raises Refused with what it says instead."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except FileNotFoundError:
        raise Refused(f"{NEEDED}. There is no {command[0]}.") from None
    if done.returncode:
        said = done.stderr.strip() or f"exit status {done.returncode}"
        raise Refused(f"{NEEDED}. `{shlex.join(command)}` said: {said}")
    return done.stdout


class Namespaces:
    """Namespaces of the kinds that `unshare` is asked for, set up by a shell script. Another one,
    `after`, runs if this process ends without a call of `end`.
    """

    def __init__(self, kinds: Sequence[str], script: str, after: str = "") -> None:
        shell = f"set -e\n{script}\necho up\ncat\n{after}"
        try:
            # `cat` ends with its input, which this process alone can write to
            self._keeper = subprocess.Popen(
                ["unshare", *kinds, "--fork", "--kill-child", "sh", "-c", shell],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        except FileNotFoundError:
            raise Refused(f"{NEEDED}. There is no unshare.") from None
        self.pid = self._keeper.pid
        assert self._keeper.stdout and self._keeper.stderr
        if self._keeper.stdout.readline() != "up\n":
            said = self._keeper.stderr.read().strip()
            self.end()
            raise Refused(f"{NEEDED}. `unshare {shlex.join(kinds)}` said: {said}")

    def end(self) -> None:
        """Kills every process in it; the kernel removes its links and mounts."""
        # its child, which is number 1 inside, ends with it, and the others with that one
        self._keeper.kill()
        self._keeper.communicate()

    def command(self, *command: str) -> list[str]:
        """A command line that runs another one inside."""
        files = [f"--{kind}=/proc/{self.pid}/ns/{file}" for kind, file in FILES]
        return ["nsenter", *files, f"--wdns={os.getcwd()}", "--", *command]


FILES = (
    ("net", "net"),
    ("ipc", "ipc"),
    ("uts", "uts"),
    ("pid", "pid_for_children"),
    ("mount", "mnt"),  # last: /proc of the others is read before
)
"""Options of nsenter, and files of /proc."""


def enter(pid: int) -> None:
    """Moves this process, which must have one thread, into the namespaces of a keeper; its children
    alone get numbers there.
    """
    folder, libc = os.getcwd(), ctypes.CDLL(None, use_errno=True)
    handles = [os.open(f"/proc/{pid}/ns/{file}", os.O_RDONLY) for _, file in FILES]
    for handle in handles:
        if libc.setns(handle, 0):
            raise OSError(ctypes.get_errno(), f"process {pid} has ended, or may not be joined")
        os.close(handle)
    os.chdir(folder)


def inside(pipe: Any, pid: int, target: Callable[..., Any], *arguments: Any) -> None:
    """What a `tests.processes.Child` runs to run `target(pipe, *arguments)` in the namespaces of a
    keeper. It ends as that does, with its exit status or by its signal, and that one with it.
    """
    enter(pid)
    inner = os.fork()
    if inner:
        pipe.close()  # else its other end would not see that the inner process has ended
        # engines are asked by it what their threads do
        signal.signal(signal.SIGUSR2, lambda number, _: os.kill(inner, number))
        _, status = os.waitpid(inner, 0)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            with suppress(OSError):  # SIGKILL has no handler
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    target(pipe, *arguments)


def private_folders(visible: Sequence[str]) -> str:
    """A script that gives a host its own /tmp, /run and /dev/shm, but for folders in there that are
    the same on all hosts: where Python and this checkout are, and `visible`.
    """
    shared = [str(CHECKOUT), sys.prefix, sys.base_prefix, *visible]
    kept = sorted({path for path in shared if Path(path).is_relative_to("/tmp")})
    lines = [f"exec {number}<{shlex.quote(path)}" for number, path in enumerate(kept, 3)]
    lines += [f"mount -t tmpfs tmpfs {folder}" for folder in ("/tmp", "/run", "/dev/shm")]
    for number, path in enumerate(kept, 3):
        quoted = shlex.quote(path)
        lines += [f"mkdir -p {quoted}", f"mount -c --bind /proc/self/fd/{number} {quoted}"]
    return "\n".join(lines)
