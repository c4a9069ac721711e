"""Ports for servers of tests."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """A free port below the range from which the kernel assigns ports: no connection takes it
    before its server does.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as trial:
            try:
                trial.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
