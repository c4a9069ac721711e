"""A process that carries packets between the ports of a switch, late, and not all of them. Linux
has `netem` for this, which not every kernel has; this needs none and is the same everywhere.
"""

from __future__ import annotations

import random
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

ALL = 0x0003
"""ETH_P_ALL."""
SO_RCVBUFFORCE = 33
"""A receive buffer of any size, for root."""
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
VNET_HDR = 10
"""Bytes before each frame: what is left to do for it, its checksum for instance."""
ROOM = 16 << 20
"""Bytes that the kernel keeps of a port until this process reads them."""


def _opened(port: str) -> socket.socket:
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL))
    wire.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, ROOM)
    wire.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    wire.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    wire.bind((port, ALL))
    wire.setblocking(False)
    return wire


def carry(pipe: Any, ports: Sequence[str], delay: float, loss: float) -> None:
    """Until the pipe ends. Each packet takes `delay` seconds; the share `loss` is lost."""
    wires = [_opened(port) for port in ports]
    choice = random.Random(7)
    places: dict[bytes, socket.socket] = {}
    late: deque[tuple[float, socket.socket, bytes]] = deque()
    pipe.send(None)
    while True:
        now = time.monotonic()
        while late and late[0][0] <= now:
            _, source, frame = late.popleft()
            target = places.get(frame[VNET_HDR : VNET_HDR + 6])
            for wire in [target] if target else wires:
                if wire is not source:
                    with suppress(OSError):  # a full queue, or a port that is down
                        wire.send(frame)
        readable = wait([pipe, *wires], late[0][0] - now if late else None)
        if pipe in readable:
            return
        for source in readable:
            with suppress(OSError):
                while True:
                    frame = source.recv(VNET_HDR + 65_550)
                    places[frame[VNET_HDR + 6 : VNET_HDR + 12]] = source
                    if choice.random() >= loss:
                        late.append((time.monotonic() + delay, source, frame))
