"""Folders and servers of S3's protocol: writers that are killed, disks that are full, servers that
hang, refuse or are gone.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from uuid import uuid4

import numpy as np
import pytest

from disagg.store.floors import open_floor
from disagg.store.floors.base import FloorError, NotThere
from tests.disagg.store.servers import CREDENTIALS, MIB, S3Server, stopped
from tests.gil import gil_held
from tests.processes import started, until

CLONE_NEWNS = 0x20000


def read(floor, name, size):
    with floor.read(name, [(0, size)]) as (buffer,):
        return bytes(buffer)


@pytest.fixture
def without_credentials(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "AZURE_"))]:
        monkeypatch.delenv(name)
    # a host's role is asked for here: nothing listens
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")


@pytest.fixture
def credentials(without_credentials, monkeypatch):
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def silent():
    """The address of a server that accepts connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def failed(call, seconds):
    """The text of the FloorError that it raises, within so many seconds."""
    begin = time.monotonic()
    with pytest.raises(FloorError) as failure:
        call()
    assert time.monotonic() - begin < seconds
    return str(failure.value)


def every_call(floor):
    return {
        "create": lambda: floor.create("a/b", [b"x"]),
        "create large": lambda: floor.create("a/b", [bytes(8 * MIB)]),
        "put": lambda: floor.put("a/b", [b"x"]),
        "read": lambda: read(floor, "a/b", 1),
        "exists": lambda: floor.exists(["a/b"]),
        "exists of many": lambda: floor.exists([f"a/{number}" for number in range(40)]),
        "list": lambda: [*floor.list("a")],
        "delete": lambda: floor.delete(["a/b"]),
    }


# memory


def test_floors_of_one_name_share_a_memory_that_ends_with_the_last():
    url = f"memory://{uuid4().hex}"
    one, two = open_floor(url), open_floor(url)
    one.create("a", [b"x"])
    assert two.exists(["a"]) == [True]
    assert open_floor(f"{url}2").exists(["a"]) == [False]
    del one
    assert two.exists(["a"]) == [True]
    del two
    assert open_floor(url).exists(["a"]) == [False]


# folders

WRITER = """
import sys
from disagg.store.floors import open_floor
floor = open_floor(sys.argv[1])
for number in range(10_000):
    floor.create(f"killed/{number}", [bytes([number % 251]) * (32 << 20)])
    floor.delete([f"killed/{number - 2}"]) if number > 1 else None
"""


def test_a_killed_writer_leaves_nothing_that_can_be_seen(tmp_path):
    floor = open_floor(f"file://{tmp_path}")
    with started([sys.executable, "-c", WRITER, f"file://{tmp_path}"]) as writer:

        def writing():
            return [path for path in tmp_path.rglob("*#*") if path.name]

        until(writing)
        writer.kill()
        writer.wait()
    left = writing()
    for listed in floor.list(""):
        number = int(listed.name.rpartition("/")[2])
        assert listed.size == 32 * MIB
        assert read(floor, listed.name, listed.size) == bytes([number % 251]) * (32 * MIB)
    if left:  # it may have come to its end before it was killed
        name = str(left[0].relative_to(tmp_path)).partition("#")[0]
        assert floor.exists([name]) == [False]
        assert floor.sweep(3600) == 0 and left[0].exists()
        assert floor.sweep(0) == len(left)
        assert floor.create(name, [b"again"]) and read(floor, name, 5) == b"again"
    assert not writing()


def test_what_a_killed_writer_left_is_swept_when_it_is_old_and_never_listed(tmp_path):
    floor = open_floor(f"file://{tmp_path}")
    floor.create("a/whole", [b"x"])
    (tmp_path / "a" / "cut#1").write_bytes(b"half")
    (tmp_path / "a" / "old#23").write_bytes(b"half")
    os.utime(tmp_path / "a" / "old#23", (1, 1))
    assert [listed.name for listed in floor.list("")] == ["a/whole"]
    assert floor.exists(["a/cut", "a/old"]) == [False, False]
    assert floor.sweep(60) == 1 and floor.sweep(60) == 0
    assert sorted(os.listdir(tmp_path / "a")) == ["cut#1", "whole"]


def test_files_of_others_are_left_out_of_lists(tmp_path):
    floor = open_floor(f"file://{tmp_path}")
    floor.create("a/b", [b"x"])
    for name in ("notes for me.txt", ".hidden", "ä"):
        (tmp_path / "a" / name).write_text("not ours")
    assert [listed.name for listed in floor.list("")] == ["a/b"]


def test_folders_of_objects_that_are_gone_go_too(tmp_path):
    floor = open_floor(f"file://{tmp_path}/objects")
    names = [f"space/{number}/object" for number in range(20)]
    for name in names:
        floor.create(name, [b"x"])
    floor.delete(names)
    assert os.listdir(tmp_path) == ["objects"] and os.listdir(tmp_path / "objects") == []
    assert floor.create(names[0], [b"again"])


def test_a_list_tells_when_an_object_was_last_read(tmp_path):
    floor = open_floor(f"file://{tmp_path}")
    for name in ("a/read", "a/left"):
        floor.create(name, [b"x"])
        os.utime(tmp_path / name, (1000, 1000))
    begin = time.time()
    read(floor, "a/read", 1)
    times = {entry.name: entry.modified for entry in floor.list("")}
    assert times["a/left"] == 1000 and begin - 2 <= times["a/read"] <= time.time() + 2
    os.utime(tmp_path / "a/read", (begin - 30, begin - 30))  # recent enough: nothing is written
    read(floor, "a/read", 1)
    assert (tmp_path / "a/read").stat().st_mtime == pytest.approx(begin - 30, abs=0.1)


def test_objects_larger_than_the_memory_for_reads_are_read_whole(tmp_path):
    floor = open_floor(f"file://{tmp_path}")
    data = np.random.default_rng(0).integers(0, 256, 70 * MIB, dtype=np.uint8).tobytes()
    floor.create("a", [data])
    assert read(floor, "a", len(data)) == data


def test_a_folder_in_the_place_of_an_object_is_no_object(tmp_path):
    floor = open_floor(f"file://{tmp_path}")
    floor.create("a/b/c", [b"x"])
    assert floor.exists(["a/b", "a/b/c"]) == [False, True]
    with pytest.raises(NotThere):
        read(floor, "a/b", 1)
    with pytest.raises(NotThere):
        read(floor, "a/b/c/d", 1)
    with pytest.raises(FloorError):
        floor.create("a/b/c/d", [b"x"])


FULL = """
import resource, sys
from disagg.store.floors import open_floor
from disagg.store.floors.base import FloorFull
floor = open_floor(sys.argv[1])
floor.create("a/small", [b"x" * 1000])
if sys.argv[2:]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
for call in (floor.create, floor.put):
    try:
        call("a/large", [bytes(4 << 20)])
    except FloorFull as error:
        print(error)
floor.put("a/small", [b"y" * 1000])
print(floor.exists(["a/small", "a/large"]))
floor.delete(["a/small"])
"""


def full(*arguments, **options):
    command = [sys.executable, "-c", FULL, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_file_that_may_not_be_as_large_leaves_nothing(tmp_path):
    *errors, exists = full(f"file://{tmp_path}", "limit")
    assert len(errors) == 2 and all("no room (File too large)" in line for line in errors)
    assert exists == "[True, False]"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.root
def test_a_full_disk_leaves_nothing_and_works_again(tmp_path):
    """A file system of 2 MiB, in a mount namespace of the process that writes."""
    libc = ctypes.CDLL(None, use_errno=True)

    def mount():
        if libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, 1 << 14 | 1 << 18, None):
            os._exit(91)  # of what is mounted here, nothing goes out
        if libc.mount(b"none", bytes(tmp_path), b"tmpfs", 0, b"size=2m"):
            os._exit(92)

    *errors, exists = full(f"file://{tmp_path}", preexec_fn=mount)
    assert len(errors) == 2 and all("no room (No space left on device)" in e for e in errors)
    assert exists == "[True, False]"


def test_a_folder_that_cannot_be_is_told_when_it_is_opened(tmp_path):
    (tmp_path / "file").write_text("in the way")
    for path, words in (("file", "File exists"), ("file/below", "Not a directory")):
        with pytest.raises(FloorError, match=f"the folder cannot be used: {words}"):
            open_floor(f"file://{tmp_path}/{path}")
    with pytest.raises(FloorError, match="the folder cannot be used"):
        open_floor("file:///proc/objects")


def test_a_folder_that_is_taken_away_is_an_error_and_not_a_miss(tmp_path):
    floor = open_floor(f"file://{tmp_path}/objects")
    floor.create("a/b", [b"x"])
    (tmp_path / "objects").rename(tmp_path / "elsewhere")
    for name in ("read", "exists"):
        assert "the folder is gone" in failed(every_call(floor)[name], 5)
    (tmp_path / "elsewhere").rename(tmp_path / "objects")
    assert read(floor, "a/b", 1) == b"x"


# S3


def test_no_call_of_a_server_that_hangs_takes_longer_than_its_time(credentials, silent):
    floor = open_floor(f"s3://bucket/prefix?endpoint={silent}&timeout=0.5")
    for name, call in every_call(floor).items():
        # 40 names are asked for 16 at a time
        text = failed(call, 10 if "many" in name else 5)
        assert "does not answer within 0.5 seconds" in text, name


def test_threads_of_a_server_that_hangs_wait_side_by_side(credentials, silent):
    floor, texts = open_floor(f"s3://bucket?endpoint={silent}&timeout=1"), []
    threads = [
        threading.Thread(target=lambda: texts.append(failed(every_call(floor)["read"], 8)))
        for _ in range(8)
    ]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(texts) == 8 and time.monotonic() - begin < 8


def test_without_credentials_the_error_says_how_to_give_them(without_credentials):
    server = S3Server()  # it need not run: credentials come first
    floor = open_floor(server.url(timeout=2))
    for call in every_call(floor).values():
        assert "there are no credentials. Set AWS_ACCESS_KEY_ID and" in failed(call, 20)


def test_a_host_without_a_role_does_not_hold_a_call(without_credentials, silent, monkeypatch):
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", silent)
    floor = open_floor(f"s3://bucket?endpoint={silent}&timeout=1")
    assert "there are no credentials" in failed(lambda: floor.exists(["a"]), 8)


def test_credentials_that_a_server_refuses_are_told_with_its_reason(credentials):
    server = S3Server(INITIAL_NO_AUTH_ACTION_COUNT="2")  # which make the bucket
    with server.running():
        floor = open_floor(server.url("prefix", timeout=5))
        calls = every_call(floor)
        for name in ("create", "read", "list"):
            text = failed(calls[name], 20)
            assert "the credentials are refused (InvalidAccessKeyId: The AWS Access Key" in text
        assert "the credentials are refused (status 403)" in failed(calls["exists"], 20)


def test_a_bucket_that_is_not_there_is_told(credentials):
    server = S3Server()
    with server.running():
        floor = open_floor(server.url(bucket="nobody-made-it", timeout=5))
        calls = every_call(floor)
        for name in ("create", "put", "read", "list", "exists", "exists of many"):
            assert "there is no bucket 'nobody-made-it'" in failed(calls[name], 20)


def test_a_server_that_hangs_or_dies_is_an_error_until_it_is_back(credentials):
    server = S3Server()
    floor = open_floor(server.url("prefix", timeout=1))
    assert "no server can be reached (Connection refused)" in failed(lambda: floor.exists(["a"]), 9)
    with server.running() as process:
        assert floor.create("a", [b"x"])
        with stopped(process):
            assert "does not answer within 1 seconds" in failed(lambda: floor.exists(["a"]), 9)
        until(lambda: answers(floor))
        assert read(floor, "a", 1) == b"x"
        process.kill()
        process.wait()
        for call in every_call(floor).values():
            assert "no server can be reached" in failed(call, 9)
    with server.running():  # it has forgotten everything
        assert floor.exists(["a"]) == [False]
        assert floor.create("a", [b"y"]) and read(floor, "a", 1) == b"y"


def answers(floor):
    with suppress(FloorError):
        floor.exists(["a"])
        return True
    return False


def test_a_prefix_is_a_place_of_its_own(credentials):
    server = S3Server()
    with server.running():
        one, two = (open_floor(server.url(prefix)) for prefix in ("one", "one/two"))
        whole = open_floor(server.url())
        one.create("a", [b"1"])
        two.create("a", [b"2"])
        assert [entry.name for entry in two.list("")] == ["a"]
        assert {entry.name for entry in whole.list("")} == {"one/a", "one/two/a"}
        assert read(whole, "one/two/a", 1) == b"2"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("az://container/prefix", "Account must be specified. Set AZURE_STORAGE_ACCOUNT_NAME"),
        ("gs://bucket/prefix", "Set GOOGLE_APPLICATION_CREDENTIALS"),
    ],
)
def test_other_clouds_say_what_they_lack(without_credentials, monkeypatch, url, words):
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    monkeypatch.setenv("METADATA_HOST", "127.0.0.1:1")

    assert words in failed(lambda: open_floor(url).exists(["a"]), 30)


@pytest.mark.parametrize("kind", ["create", "read"])
def test_the_gil_is_not_kept_while_bytes_move(tmp_path, kind):
    """Another thread counts meanwhile, which gets the GIL only where a call lets it go."""
    floor, data = open_floor(f"file://{tmp_path}"), np.zeros(64 * MIB, np.uint8)
    floor.create("a/read", [data])
    ticks, spans, ended = [], [], threading.Event()

    def count():
        while not ended.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0005)

    calls = {
        "create": lambda turn: floor.create(f"a/{turn}", [data]),
        "read": lambda turn: read_only(floor, "a/read", data.size),
    }
    counter = threading.Thread(target=count)
    counter.start()
    until(lambda: len(ticks) > 10)
    with gil_held():
        for turn in range(8):
            begin = time.perf_counter()
            calls[kind](turn)
            spans.append((begin, time.perf_counter()))
    ended.set()
    counter.join()
    # one tick may be of the moment in which the call lets go to begin
    assert sum(begin < tick < end for begin, end in spans for tick in ticks) > len(spans)


def read_only(floor, name, size):
    with floor.read(name, [(0, size)]) as buffers:
        assert len(buffers[0]) == size
