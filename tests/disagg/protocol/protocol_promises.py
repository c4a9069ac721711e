"""What a world of the protocol model must keep, after every step and in the end."""

from __future__ import annotations

import re

from disagg.protocol.peers.liveness import CHECKS_PER_TIMEOUT
from disagg.protocol.status import KVPoll
from disagg.runtime.staging import NUM_BUFFERS
from tests.disagg.protocol.protocol_model import READ_TIMEOUT, Decode, Node, Prefill, World

# why a room may fail, and what must have been done to one who had to do with it: see `caused`
REASONS = {
    r"rank .* (was silent for more|has not answered)": "mute prefill, cut, loss",
    # a hello that comes once more makes prefill wait for a decode that has hung up
    "decode was silent": "mute decode, mute prefill, cut, unread, disconnect, rubbish, repeat, "
    "loss",
    "no longer knows this decode": "cut, mute decode, mute prefill, renewal, loss",
    "what served reads is gone": "renewal",
    "messages to it are unread": "unread",
    # a message that is left unread may be the abort before it
    "has disconnected": "disconnect, unread, reorder, loss",
    "cannot be reached": "cut, mute decode, mute prefill, unread, disconnect, rubbish, loss",
    "read from rank": "engine, mute decode, mute prefill, cut, renewal",
    "its lease ended": "lease",
    # a name that was used before: a decode may have meant either use
    "a decode was told of an earlier room": "again",
    "nothing has happened for|no chunk of it was sent while": "offer",
    "asked for it already|one reader says": "twice",
    "decode made room for|Send the same tokens of a request": "longer",
    "cannot be served": "rubbish",
    "whose hello was answered already": "repeat",
    "the next chunk starts there|were not sent|(was|were) sent already": "reorder, loss",
    # a hello that comes once more after a silence: prefill knows the decode, and the room no longer
    "released its pages before|gives no digests": "reorder, loss, repeat",
    "differs from": "reorder",
    "no longer asks for this room": "unread, reorder, repeat, loss",
}


def check(world: World) -> None:
    """What holds after every step."""
    assert not world.broken, world.broken
    for node in world.everybody():
        if node.alive:
            pages_add_up(node)
            for name, room in node.rooms.items():
                assert room.reported == room.given_back, f"{name!r} was reported {room.reported}x"
            for name in node.machine.rooms.by_name:
                failure = node.machine.failure(name)
                assert failure is None or caused(node, name, failure.reason), f"{name!r} {failure}"


def pages_add_up(node: Node) -> None:
    """Leased, quarantined and free pages are all."""
    leases, rooms = node.machine.rooms.leases(), node.rooms.values()
    leased, quarantined = leases.leased.get("kv", 0), leases.quarantined.get("kv", 0)
    assert leased == sum(len(room.pages) for room in rooms if room.ended is None)
    assert quarantined == sum(len(room.pages) for room in rooms if room.ended is not None)
    assert leased + quarantined == len(node.owners)
    assert len(node.owners) + node.alloc.free_pages == node.pages


def caused(node: Node, name, reason: str) -> bool:
    """Whether something was done that explains it, to one who had to do with this room."""
    world = node.world
    service = node.service if isinstance(node, Prefill) else node.rooms[name].service
    abort = re.search(r"abort (\d+)\.", reason)
    if abort:
        return world.aborts[int(abort[1])] == (service, name)
    wants = [f for f in world.faults if f[0] == "wanted" and f[2:4] == (service, name)]
    pairs = {(want[1], rank.address) for want in wants for rank in world.ranks(service)}
    return any(
        (cause == "lease" and None is not world.lease <= world.now - world.began)
        or (cause == "offer" and None is not world.offer <= world.now - world.began)
        or (cause == "twice" and len(wants) > 1)
        or (cause == "again" and bool(wants))
        or (cause == "longer" and (cause, service, name) in world.faults)
        or cause in world.network
        or any((cause, *pair) in world.faults for pair in pairs)
        for pattern, causes in REASONS.items()
        if re.search(pattern, reason)
        for cause in causes.split(", ")
    )


def settle(world: World) -> None:
    """Calls have stopped, and everybody who lives is heard, but for messages that the network
    loses. Then every room ends within the bounds of docs/reliability.md, or waits for what no bound
    was given for; nothing is left, and all works again.
    """
    world.traps.clear()
    for node in world.everybody():
        node.stopped = False
        node.transport.unread.clear()
        engine = node.engine
        engine.patient, engine.meanwhile, engine.fate = False, None, ""
        engine.trouble.clear()
    go(world, 3)
    silence = max(node.timeout for node in world.everybody())
    # a request may come when the room of decode is about to end, and begins a lease
    bound = READ_TIMEOUT + (world.offer or 0) + (world.lease or 0)
    world.pass_time((silence + bound) * (1 + 1 / CHECKS_PER_TIMEOUT) + 3, True)
    check(world)
    for node in world.able():
        for name in list(node.machine.rooms.open):
            awaited = (
                f"{name!r} of life {node.life} waits for {node.machine.rooms.known(name).waits_for}"
            )
            assert unbounded(node, name) and may_wait(node, name), awaited
    world.loss = 0.0
    if "loss" in world.network:
        world.pass_time(2 * silence, True)  # who was lost is back, or known to be dead
    go(world, 10)  # parts of a few bytes take a turn each
    for node in reversed(world.able()):
        for name in list(node.machine.rooms.open):
            late = world.network or isinstance(node, Decode)  # a want may come after its abort
            room = node.machine.rooms.by_name[name]
            # nobody wants it who is not done with it
            assert late or not room.requests.keys() - room.done, f"{name!r} was aborted and goes on"
            node.abort(name)
        go(world, 3)
    for node in world.able():
        forget(node)
        left = left_behind(node)
        assert not left, left
    work_again(world)


def go(world: World, rounds: int) -> None:
    world.live(rounds)
    check(world)


def unbounded(node: Node, name) -> bool:
    """Whether no bound was given for a room: what is sent has a lease, what is not is waited for
    as long as decode says.
    """
    leased = isinstance(node, Prefill) and node.machine.rooms.by_name[name].chunks
    return (node.world.lease if leased else node.world.offer) is None


def may_wait(node: Node, name) -> bool:
    """Whether a room is open because somebody who lives has not done his part."""
    room = node.machine.rooms.by_name[name]
    if isinstance(node, Prefill):
        conns = [node.transport.connections.get(peer) for peer in room.requests.keys() - room.done]
        return all(conn is not None and not conn.lost and conn.decode.alive for conn in conns)
    ranks = [node.world.prefills[address] for address in room.link.addresses]
    return all(rank.alive for rank in ranks) and not room.whole


def forget(node: Node) -> None:
    """Forgets what may be forgotten, and is refused the rest."""
    for name in list(node.machine.rooms.by_name):
        reading = isinstance(node, Decode) and node.machine.rooms.known(name).reading
        if node.machine.poll(name).ended and not reading:
            node.forget(name)
        else:
            try:
                node.endpoint.forget(name)
            except ValueError as error:
                assert "has not ended" in str(error)
            else:
                raise AssertionError(f"{name!r} can be forgotten")


def left_behind(node: Node) -> list[str]:
    """What a node that has nothing to do any more still keeps, and should not."""
    machine, endpoint = node.machine, node.endpoint
    peers, waited = machine.peers, {*machine.peers.liveness}
    kept = {
        "rooms": {*machine.rooms.by_name},
        "open rooms": machine.rooms.open,
        "effects": endpoint._loop.pending,
        "digests": endpoint._loop.digester.busy,
    }
    if isinstance(node, Prefill):
        kept |= {
            "requests": [name for peer in peers.alive.values() for name in peer.rooms],
            "peers": [p for p in peers.alive if node.transport.connections.get(p) is None],
            "silent peers": waited ^ peers.alive.keys(),
        }
    else:
        reader, stage = endpoint._loop.reader, node.engine.stage
        kept |= {
            "rooms": kept["rooms"] ^ {tracked.read.room for tracked in reader._context.quarantined},
            "buffers": stage.owners
            if stage and len(stage.owners) != NUM_BUFFERS - stage._usable
            else (),
            "links": {id(link) for link in peers.links}
            ^ {id(link) for link in node.links.values()},
            "connections": peers.by_number.keys() ^ node.transport.connections.keys(),
            "silent peers": waited - peers.by_number.keys(),
            "reads": reader._reads(),
            "fences": [lane for lane in (*reader._lanes.values(), *reader._dropped) if lane.fences],
            "lanes at work": list(reader._active),
            "lanes of nobody": reader._lanes.keys() - _lives(peers.links),
            "transfers": [t for t in node.engine.transfers if not t.peer.unfenceable],
        }
    return [f"{what}: {value}" for what, value in kept.items() if value]


def _lives(links) -> set[tuple[object, str]]:
    """Ranks and their lives, as reads are told apart."""
    ranks = (rank for link in links for rank in link.ranks if rank.hello)
    return {(rank, rank.hello.generation) for rank in ranks}


def work_again(world: World) -> None:
    """Everybody is there, is greeted, and hands a room over with everybody."""
    for node in world.everybody():
        if not node.alive:
            world.restart(node)
    services = {node.service: 0 for node in world.prefills.values()}
    for node in world.decodes:
        for service in services:
            if service in node.links and node.links[service].refusal is not None:
                node.disconnect(service)
            if service not in node.links:
                node.connect(service)
    world.pass_time(max(node.timeout for node in world.decodes), True)
    readers = [node.readers for node in world.decodes]
    for service in services:
        if all(count != 1 for count in readers):
            succeed("together", service, world.decodes)
        for node in world.decodes:
            if node.readers == 1:
                succeed(f"alone {node.number}", service, [node])


def succeed(name, service: int, decodes) -> None:
    """A room of two tokens is handed over."""
    if not all(node.alloc.free_pages for node in decodes):  # what is in quarantine stays there
        return
    world = decodes[0].world
    for node in world.ranks(service):
        node.send(name, 2, 2, layer=1)
        node.send(name, 2, 2)
    for node in decodes:
        node.want(name, service, 2, 0)
    world.live(30)
    for node in (*decodes, *world.ranks(service)):
        assert node.machine.poll(name) is KVPoll.Success, str(node.machine.failure(name))
        node.forget(name)
