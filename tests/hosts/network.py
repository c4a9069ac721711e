"""Hosts joined by a switch, and what can be done to their links. No route leads out of it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any
from uuid import uuid4

from typing_extensions import Self

from tests.hosts import wire
from tests.hosts.namespaces import Namespaces, called, inside, private_folders
from tests.processes import Child

HOST = "--net", "--pid", "--mount", "--ipc", "--uts", "--mount-proc"
SWITCH = ("--net",)
NOTHING = "rate", "8bit", "burst", "8", "limit", "8"
"""Of tc's tbf: no packet is as short as its burst, and so all are dropped, without an error."""
QUEUE_MS = 50
"""What waits for a slow link; what would wait for longer is dropped."""


class Host:
    """One host: its namespaces, its addresses, and its name in /etc/hosts of all."""

    def __init__(self, number: int, folder: str) -> None:
        self.number, self.name, self.port = number, f"host{number}", f"port{number}"
        self.ipv4, self.ipv6 = f"10.77.0.{number + 1}", f"fd77::{number + 1:x}"
        self._folder = folder
        self.namespaces = self._booted()

    def child(self, target: Callable[..., Any], *arguments: Any) -> Child:
        """A process of this host that runs `target(pipe, *arguments)`."""
        return Child(inside, self.namespaces.pid, target, *arguments)

    def command(self, *command: str) -> list[str]:
        """A command line that runs another one on this host."""
        return self.namespaces.command(*command)

    def _booted(self) -> Namespaces:
        # what tells hosts apart beside their addresses: NIXL and engine `local` ask for it
        boot = f"{self._folder}/boot{self.number}"
        with open(boot, "w") as file:
            print(uuid4(), file=file)
        script = [
            private_folders([self._folder]),
            f"hostname {self.name}",
            f"mount --bind {boot} /proc/sys/kernel/random/boot_id",
            f"mount --bind {self._folder}/hosts /etc/hosts",
        ]
        return Namespaces(HOST, "\n".join(script))

    def restart(self) -> None:
        """Ends what is left of it, and boots it; it has no link yet."""
        self.namespaces.end()
        self.namespaces = self._booted()


class Network:
    """`count` hosts and their switch. As a context it removes all of them at the end. Hosts have an
    IPv6 address, and an IPv4 address unless `ipv4` is false.
    """

    def __init__(self, count: int, *, ipv4: bool = True) -> None:
        self.ipv4 = ipv4
        # seen by all hosts at the same path: logs, and keys, which are copied to them otherwise
        self.folder = tempfile.mkdtemp(prefix="kvpool-hosts-")
        self.hosts: list[Host] = []
        self._parts: list[Namespaces] = []
        self._wire: Child | None = None
        try:
            with open(f"{self.folder}/hosts", "w") as file:
                file.writelines(_names(count, ipv4))
            self._switch = Namespaces(SWITCH, "ip link set lo up", f"rm -rf {self.folder}")
            self._parts.append(self._switch)
            self._ip("link add switch type bridge forward_delay 0 mcast_snooping 0")
            self._ip("link set switch up")
            for number in range(count):
                self.hosts.append(Host(number, self.folder))
                self.attach(self.hosts[number])
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self.direct()
        for part in (*(host.namespaces for host in self.hosts), *self._parts):
            part.end()
        # the switch's keeper may be removing it too
        shutil.rmtree(self.folder, ignore_errors=True)

    def attach(self, host: Host) -> None:
        """Plugs a host in that has no link: its card has the same address each time."""
        pid, port = host.namespaces.pid, host.port
        card = f"02:77:00:00:00:{host.number + 1:02x}"
        self._ip(f"link add {port} type veth peer name eth0 address {card} netns {pid}")
        self._ip(f"link set {port} master switch up")
        self._on(host, "link set lo up")
        self._on(host, "link set eth0 up")
        if self.ipv4:
            self._on(host, f"addr add {host.ipv4}/24 dev eth0")
        self._on(host, f"addr add {host.ipv6}/64 dev eth0 nodad")

    def rate(self, host: Host, rate: str | None) -> None:
        """What the switch sends to a host goes at a rate ("100mbit"), or as fast as it can."""
        self._unshape(self._switch, host.port)
        if rate is not None:
            shape = "rate", rate, "burst", "64kb", "latency", f"{QUEUE_MS}ms"
            self._shape(self._switch, host.port, *shape)

    def deafen(self, host: Host) -> None:
        """Nothing reaches a host, without a word: what it sends arrives. `rate` ends it."""
        self._unshape(self._switch, host.port)
        self._shape(self._switch, host.port, *NOTHING)

    def mute(self, host: Host) -> None:
        """Nothing that a host sends arrives, without a word."""
        self._unshape(host.namespaces, "eth0")
        self._shape(host.namespaces, "eth0", *NOTHING)

    def unmute(self, host: Host) -> None:
        """What it sends arrives again."""
        self._unshape(host.namespaces, "eth0")

    def unplug(self, host: Host) -> None:
        """Takes a host's link down: both ends see it."""
        self._ip(f"link set {host.port} down")

    def plug(self, host: Host) -> None:
        """Takes it up again."""
        self._ip(f"link set {host.port} up")

    def vanish(self, host: Host) -> None:
        """A host loses its power: nobody hears of it any more, not even that."""
        self._ip(f"link del {host.port}")
        host.namespaces.end()

    def boot(self, host: Host) -> None:
        """One that has vanished is back, with its address and no process."""
        host.restart()
        self.attach(host)

    def disturb(self, *, delay: float = 0.0, loss: float = 0.0) -> None:
        """From now on every packet takes `delay` seconds more, and the share `loss` is lost."""
        self.direct()
        ports = [host.port for host in self.hosts]
        for host in self.hosts:
            self._ip(f"link set {host.port} nomaster")
            # lost are packets as they are on a wire, not what the kernel cuts them from
            self._on(host, "link set eth0 gso_max_segs 1")
        self._wire = Child(inside, self._switch.pid, wire.carry, ports, delay, loss)
        self._wire.answer()

    def direct(self) -> None:
        """Ends that."""
        if self._wire is None:
            return
        with self._wire:  # which kills it
            self._wire = None
        for host in self.hosts:
            self._ip(f"link set {host.port} master switch")

    def _ip(self, arguments: str) -> None:
        called(self._switch.command("ip", *arguments.split()))

    def _on(self, host: Host, arguments: str) -> None:
        called(host.command("ip", *arguments.split()))

    def _shape(self, place: Namespaces, device: str, *shape: str) -> None:
        called(place.command("tc", "qdisc", "add", "dev", device, "root", "tbf", *shape))

    def _unshape(self, place: Namespaces, device: str) -> None:
        if "tbf" in called(place.command("tc", "qdisc", "show", "dev", device)):
            called(place.command("tc", "qdisc", "del", "dev", device, "root"))


def _names(count: int, ipv4: bool) -> Iterator[str]:
    """Lines of /etc/hosts."""
    yield "127.0.0.1 localhost\n::1 localhost\n"
    for number in range(count):
        name, last = f"host{number}", number + 1
        if ipv4:
            yield f"10.77.0.{last} {name}\n"
        yield f"fd77::{last:x} {name}\n"
