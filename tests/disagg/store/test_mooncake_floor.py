"""Mooncake's store with masters that are away, hang, die and come back, and memory that goes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress

import numpy as np
import pytest

from disagg.store.floors import open_floor, staging as staging_module
from disagg.store.floors.base import FloorError, FloorFull, NotThere
from tests.disagg.store.servers import JOIN, MIB, Master, memory_of, stopped
from tests.processes import started, until

REPLICA_IS_NOT_READY = -703
BOUND = 20.0
"""Seconds in which a call fails, on a machine that is busy; 3 to 5 on one that is not."""


def some_bytes(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8).tobytes()


def read(floor, name, size):
    with floor.read(name, [(0, size)]) as (buffer,):
        return bytes(buffer)


def failed(call):
    """The FloorError that it raises in time."""
    begin = time.monotonic()
    with pytest.raises(FloorError) as failure:
        call()
    assert time.monotonic() - begin < BOUND
    return failure.value


def every_call(floor):
    return {
        "create": lambda: floor.create("a/new", [b"x"]),
        "put": lambda: floor.put("a/put", [b"x"]),
        "read": lambda: read(floor, "a/b", 1),
        "exists": lambda: floor.exists(["a/b"]),
        "list": lambda: [*floor.list("a")],
        "delete": lambda: floor.delete(["a/put"]),
    }


def works(floor, name="a/works"):
    with suppress(FloorError):
        floor.delete([name])
        return floor.create(name, [b"works"]) and read(floor, name, 5) == b"works"
    return False


@pytest.fixture
def opened():
    """Opens floors that are closed at the end, while their masters are there."""
    with ExitStack() as stack:

        def open_(url):
            floor = open_floor(url)
            stack.callback(floor.close)
            return floor

        yield open_


@pytest.fixture
def brief(monkeypatch):
    """Calls of the master time out after a second."""
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "1000")


@pytest.fixture
def cluster():
    """A master, its process, and one that offers 64 MiB."""
    master = Master()
    with master.running() as process, memory_of(master) as memory:
        yield master, process, memory


@contextmanager
def mooncake_client(master):
    """A client of Mooncake's own."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    address = f"127.0.0.1:{master.port}"
    assert not store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", address)
    yield store
    store.close()


def wait_announced(master, name):
    """Until a create of that name has begun: the master has it, and nobody can read it."""
    with mooncake_client(master) as store:
        until(lambda: store.get_size(name) == REPLICA_IS_NOT_READY)


def test_a_master_that_is_away_is_told_and_used_once_it_is_there(opened):
    master = Master()
    floor = opened(master.url())
    for call in every_call(floor).values():
        assert "Connection refused" in str(failed(call))
    assert "Start one: kvpool store serve." in str(failed(lambda: floor.exists(["a"])))
    with master.running(), memory_of(master):
        until(lambda: works(floor))
        floor.close()


@contextmanager
def counted():
    """Counts, every 10 ms in which this thread gets the GIL."""
    ticks, ended = [], threading.Event()

    def count():
        while not ended.wait(0.01):
            ticks.append(time.monotonic())

    counter = threading.Thread(target=count)
    counter.start()
    yield ticks
    ended.set()
    counter.join()


def test_a_master_that_hangs_holds_no_call_nor_the_gil_and_loses_nothing(cluster, opened, brief):
    """Also of a client that joins: Mooncake's own would keep the GIL as long as it waits."""
    master, process, _ = cluster
    floor, later = opened(master.url()), opened(master.url())
    data = some_bytes(3 * MIB)
    floor.create("a/b", [data])
    with stopped(process):
        calls = every_call(floor) | {"join": lambda: later.exists(["a/b"])}
        for name, call in calls.items():
            with counted() as ticks:
                assert "does not answer" in str(failed(call)), name
            assert len(ticks) > 20, name
    until(lambda: works(floor))
    until(lambda: works(later))
    assert read(floor, "a/b", len(data)) == read(later, "a/b", len(data)) == data


def test_a_master_that_dies_is_an_error_and_one_without_its_memory_a_clean_start(opened, brief):
    master = Master()
    with ExitStack() as stack:
        with master.running() as process:
            stack.enter_context(memory_of(master))
            floor = opened(master.url())
            data = some_bytes(MIB)
            assert floor.create("a/b", [data]) and read(floor, "a/b", MIB) == data
            process.kill()
            process.wait()
            for name, call in every_call(floor).items():
                text = str(failed(call))
                assert "the master" in text, name
        with master.running():
            until(lambda: works(floor))
            assert floor.exists(["a/b"]) == [False]
            with pytest.raises(NotThere):
                read(floor, "a/b", 1)
            other = some_bytes(MIB, seed=1)
            assert floor.create("a/b", [other]) and read(floor, "a/b", MIB) == other
            assert floor.create("a/new", [b"x"])  # which was tried while it was dead
            floor.close()


def snapshot_of(folder):
    """Which snapshot the master would begin with."""
    latest = [*folder.glob("mooncake_master_snapshot/*/latest.txt")]
    return latest[0].read_text() if latest else ""


def test_a_master_that_is_back_with_its_memory_has_the_same_objects(opened, tmp_path):
    """Mooncake's snapshots say where objects lie; the bytes are still with who offers memory. It
    takes up those only whose leases still run.
    """
    master = Master(snapshots=tmp_path, default_kv_lease_ttl=120_000)
    with ExitStack() as stack:
        with master.running() as process:
            stack.enter_context(memory_of(master))
            floor = opened(master.url())
            data = {f"a/{number}": some_bytes(MIB, seed=number) for number in range(8)}
            for name, text in data.items():
                floor.create(name, [text])
            assert all(floor.exists([*data]))  # which gives leases
            for _ in range(2):  # of which the second began after all was there
                before = snapshot_of(tmp_path)
                until(lambda before=before: snapshot_of(tmp_path) not in ("", before))
            process.kill()
            process.wait()
            failed(lambda: floor.exists(["a/0"]))
        with master.running():
            until(lambda: works(floor))
            assert floor.exists([*data]) == [True] * 8
            assert {name: read(floor, name, MIB) for name in data} == data
            assert floor.create("a/0", [b"again"]) is False
            floor.close()


def test_memory_that_hangs_shows_no_broken_object(cluster, opened):
    """A write that fails is revoked. Mooncake would make it visible if its end were called."""
    master, _, memory = cluster
    floor, other = opened(master.url()), opened(master.url())
    data = some_bytes(2 * MIB)
    floor.create("a/b", [data])
    with stopped(memory):
        assert "the transfer failed" in str(failed(lambda: read(floor, "a/b", 1000)))
        assert "the transfer failed" in str(failed(lambda: floor.create("a/new", [data])))
        assert other.exists(["a/new"]) == [False]
        assert [entry.name for entry in other.list("a")] == ["a/b"]
        with pytest.raises(NotThere):
            read(other, "a/new", 1)

    def again():
        with suppress(FloorError):
            return read(floor, "a/b", len(data)) == data

    until(again)
    assert floor.create("a/new", [data]) and read(other, "a/new", len(data)) == data


def test_memory_that_dies_is_an_error_or_a_miss_and_never_other_bytes(opened):
    master = Master(client_ttl=4)
    with master.running():
        floor = opened(master.url())
        with memory_of(master) as memory:
            floor.create("a/b", [some_bytes(MIB)])
            memory.kill()
            memory.wait()
            failed(lambda: read(floor, "a/b", MIB))
            failed(lambda: floor.create("a/new", [b"x"]))

        def forgotten():
            return floor.exists(["a/b"]) == [False]

        until(forgotten, 60)
        with pytest.raises(FloorFull, match="Start kvpool store serve with more --memory"):
            floor.create("a/new", [b"x"])
        with memory_of(master):
            until(lambda: works(floor))
            assert floor.create("a/new", [b"x"])
            floor.close()


SESSION = """
import sys, time
import numpy as np
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert not store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", sys.argv[1])
data = np.ones(1 << 20, np.uint8)
store.register_buffer(data.ctypes.data, data.size)
print(store.batch_put_session_start(["a/b"], [data.size]))
store.batch_put_from_multi_buffer_ranges(["a/b"], [[data.ctypes.data]], [[1 << 19]], [[0]])
print("half", flush=True)
time.sleep(600)
"""


def test_a_writer_that_is_killed_in_the_middle_leaves_nothing_and_its_name_free(opened):
    master = Master(put_start_discard_timeout_sec=2, put_start_release_timeout_sec=4)
    with master.running(), memory_of(master):
        floor = opened(master.url())
        command = [sys.executable, "-c", SESSION, f"127.0.0.1:{master.port}"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with started(command, **pipes) as writer:
            assert writer.stdout.readline() == b"[0]\n"
            assert writer.stdout.readline() == b"half\n"
            assert floor.create("a/b", [b"other"]) is False  # it is being written
            floor.delete(["a/b"])  # nothing is there
        assert floor.exists(["a/b"]) == [False] and [*floor.list("")] == []
        with pytest.raises(NotThere):
            read(floor, "a/b", 1)
        until(lambda: floor.create("a/b", [b"other"]))
        assert read(floor, "a/b", 5) == b"other"
        floor.close()


def test_without_memory_the_error_says_where_it_comes_from(opened):
    master = Master()
    with master.running():
        floor = opened(master.url())
        for call in (floor.create, floor.put):
            with pytest.raises(FloorFull, match="memory= in their URLs"):
                call("a/b", [b"x"])
        own = opened(master.url(memory="32MiB"))
        until(lambda: works(own))
        assert floor.create("a/b", [b"x"]) and read(own, "a/b", 1) == b"x"
        own.close()
        floor.close()


def test_a_full_cluster_forgets_the_oldest_and_gives_no_other_bytes(opened):
    master = Master(default_kv_lease_ttl=200, eviction_ratio=0.2)
    with master.running(), memory_of(master, 32 * MIB):
        floor = opened(master.url())
        data = {f"a/{number}": some_bytes(2 * MIB, seed=number) for number in range(40)}
        for name, text in data.items():

            def created(name=name, text=text):
                with suppress(FloorFull):
                    return floor.create(name, [text])

            until(created)
        there = [name for name, known in zip(data, floor.exists([*data])) if known]
        assert there and len(there) <= 16 and "a/39" in there
        for name in data:
            try:
                assert read(floor, name, 2 * MIB) == data[name]
            except NotThere:
                assert name not in there or not floor.exists([name])[0]
        floor.close()


def test_objects_may_be_larger_than_the_staging_and_reads_may_not(cluster, opened):
    master, _, _ = cluster
    floor = opened(master.url(staging="1MiB"))
    data = some_bytes(5 * MIB + 123)
    assert floor.create("a/b", [data[:7], data[7 : 3 * MIB], data[3 * MIB :]])
    for start in range(0, len(data), MIB):
        stop = min(len(data), start + MIB)
        with floor.read("a/b", [(start, stop)]) as (buffer,):
            assert buffer == data[start:stop]
    with pytest.raises(FloorError, match=r"of 1,048,576 of staging.*staging=6MiB or more"):
        read(floor, "a/b", len(data))
    with pytest.raises(FloorError, match="of staging"):
        floor.put("a/b", [data])
    wide = opened(master.url())
    assert read(wide, "a/b", len(data)) == data


def test_reads_at_once_share_the_staging_and_wait_for_it(cluster, opened, monkeypatch):
    master, _, _ = cluster
    floor = opened(master.url(staging="1MiB"))
    data = some_bytes(600_000)
    floor.create("a/b", [data])
    with floor.read("a/b", [(0, 600_000)]) as (first,):
        monkeypatch.setattr(staging_module, "WAIT_SECONDS", 0.3)
        with pytest.raises(FloorError, match="no 600,000 bytes of staging became free"):
            read(floor, "a/b", 600_000)
        assert first == data
    assert read(floor, "a/b", 600_000) == data


class Begun:
    """A create that has been announced and waits for staging, in a thread."""

    def __init__(self, floor, name, data):
        self.outcome = None
        self._thread = threading.Thread(target=self._create, args=(floor, name, data))
        self._thread.start()

    def _create(self, floor, name, data):
        try:
            self.outcome = floor.create(name, [data])
        except FloorError as error:
            self.outcome = error

    def ended(self):
        self._thread.join(60)
        return self.outcome


def test_threads_of_one_process_create_an_object_once(cluster, opened):
    """Mooncake's client has one session for a name, and an error for a second."""
    master, _, _ = cluster
    floor = opened(master.url(staging="1MiB"))
    floor.create("a/blocking", [bytes(MIB)])
    with floor.read("a/blocking", [(0, MIB)]):  # all of the staging
        first = Begun(floor, "a/b", b"first")
        wait_announced(master, "a/b")
        assert floor.create("a/b", [b"second"]) is False
        assert floor.exists(["a/b"]) == [False]
    assert first.ended() is True
    assert read(floor, "a/b", 5) == b"first"


def test_an_object_whose_end_was_lost_can_be_created_again(opened, brief):
    """Its master dies when it has been announced: Mooncake's client keeps a session of it."""
    master = Master()
    with ExitStack() as stack:
        with master.running() as process:
            stack.enter_context(memory_of(master))
            floor = opened(master.url(staging="1MiB"))
            floor.create("a/blocking", [bytes(MIB)])
            with floor.read("a/blocking", [(0, MIB)]):
                first = Begun(floor, "a/b", b"first")
                wait_announced(master, "a/b")
                process.kill()
                process.wait()
            assert "the master" in str(first.ended())
        with master.running():
            until(lambda: works(floor))
            assert floor.create("a/b", [b"again"]) is True
            assert read(floor, "a/b", 5) == b"again"
            floor.close()


def test_a_list_needs_the_masters_http_port_and_says_so(cluster, opened):
    master, _, _ = cluster
    floor = opened(master.url().replace(f"http={master.http_port}", "http=1"))
    assert floor.create("a/b", [b"x"]) and read(floor, "a/b", 1) == b"x"
    with pytest.raises(FloorError, match=r"http=1|127.0.0.1:1 cannot be read.*--metrics_port"):
        [*floor.list("")]


def test_names_that_others_put_there_are_left_out_of_lists(cluster, opened):
    master, _, _ = cluster
    floor = opened(master.url())
    floor.create("a/b", [b"x"])
    with mooncake_client(master) as store:
        for name in ("a/b,c", "../b", "a b", "vllm@0&1"):
            assert store.put(name, b"theirs") == 0
    assert [entry.name for entry in floor.list("")] == ["a/b"]


def test_a_list_keeps_nothing_from_eviction(opened):
    """A lookup gives a lease, and a leased object cannot be removed without force."""
    master = Master(default_kv_lease_ttl=60_000)
    with master.running(), memory_of(master):
        floor = opened(master.url())
        floor.create("a/listed", [b"x"])
        floor.create("a/asked", [b"x"])
        assert len([*floor.list("a")]) == 2
        floor.exists(["a/asked"])
        with mooncake_client(master) as store:
            assert store.batch_remove(["a/listed", "a/asked"]) == [0, -706]
        floor.delete(["a/asked"])  # which is not stopped by a lease
        assert floor.exists(["a/asked"]) == [False]
        floor.close()


def test_a_forked_child_has_a_floor_that_refuses(cluster, opened):
    master, _, _ = cluster
    floor = opened(master.url())
    floor.create("a/b", [b"x"])
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            floor.exists(["a/b"])
        except FloorError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert b"belongs to the process that forked this one" in pipe.read()
    os.waitpid(child, 0)
    assert read(floor, "a/b", 1) == b"x"


def test_a_floor_that_is_dropped_leaves_its_cluster():
    master = Master()
    with master.running():
        floor = open_floor(master.url(memory="16MiB"))
        floor.create("a/b", [b"x"])
        with open_floor(master.url()).read("a/b", [(0, 1)]) as (buffer,):
            assert buffer == b"x"
        del floor
        other = open_floor(master.url())
        until(lambda: other.exists(["a/b"]) == [False])  # its memory is gone, orderly
        other.close()


UNCLOSED = (
    JOIN
    + """
if sys.argv[2:]:
    sys.stdin.read()
"""
)


@pytest.mark.parametrize("away", [False, True], ids=["with its master", "without"])
def test_a_process_ends_although_its_floor_is_open(away):
    master = Master()
    with master.running() as process:
        command = [sys.executable, "-c", UNCLOSED, master.url(memory="16MiB"), "wait"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with started(command, **pipes) as user:
            assert user.stdout.readline() == b"joined\n"
            if away:
                process.send_signal(signal.SIGKILL)
                process.wait()
            user.stdin.close()
            assert user.wait(60) == 0
