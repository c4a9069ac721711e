"""What every floor does alike: objects created whole and once, read by ranges, listed, deleted."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from disagg.store.floors import open_floor
from disagg.store.floors.base import BeyondEnd, FloorError, NotThere
from tests.disagg.store.servers import MIB

HOSTILE = [
    "",
    "/etc/passwd",
    "../outside",
    "a/../../outside",
    "a//b",
    "a/",
    "./a",
    ".hidden",
    "a/.hidden",
    "-flag",
    "a b",
    "a\0b",
    "a\nb",
    "a,b",
    "a?b",
    "a%2fb",
    "a#1",
    "ä",
    "x" * 201,
    "/".join("abcdefghi"),
]


def some_bytes(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8).tobytes()


def read(floor, name, *ranges):
    with floor.read(name, ranges) as buffers:
        return [bytes(buffer) for buffer in buffers]


def test_the_first_of_two_creates_wins_and_its_bytes_stay(floor, other_floor, space):
    name = f"{space}/object"
    assert floor.create(name, [b"first"]) is True
    assert floor.create(name, [b"second, and longer"]) is False
    assert other_floor.create(name, [b"third"]) is False
    assert read(floor, name, (0, 5)) == read(other_floor, name, (0, 5)) == [b"first"]


def test_of_writers_at_once_exactly_one_creates_a_whole_object(floor, other_floor, space):
    for turn in range(5):
        name, begin, created = f"{space}/race/{turn}", threading.Barrier(6), {}

        def write(number, name=name, begin=begin, created=created):
            begin.wait(30)
            writer = (floor, other_floor)[number % 2]
            created[number] = writer.create(name, [bytes([number]) * 100_000] * 3)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(created.values()) == [False] * 5 + [True]
        winners = [number for number, first in created.items() if first]
        assert read(floor, name, (0, 300_000)) == [bytes(winners) * 300_000]


def test_put_replaces_an_object_whatever_its_size(floor, other_floor, space):
    name = f"{space}/object"
    for size in (10, 10, 3, 100_000, 1):
        data = some_bytes(size, seed=size)
        floor.put(name, [data])
        assert read(other_floor, name, (0, size)) == [data]
        with pytest.raises(BeyondEnd):
            read(other_floor, name, (0, size + 1))


def test_ranges_are_the_bytes_of_the_object(floor, space):
    data, name = some_bytes(300_001), f"{space}/object"
    floor.create(name, [data])
    numbers = np.random.default_rng(1)
    ends = np.sort(numbers.integers(0, len(data) + 1, (200, 2)), axis=1).tolist()
    adjacent = [(start, start + 1000) for start in range(50_000, 90_000, 1000)]
    kinds = {
        "many, in any order": [(start, stop) for start, stop in ends],
        "adjacent": adjacent,
        "adjacent, backwards": adjacent[::-1],
        "one twice": [(7, 20), (7, 20)],
        "all": [(0, len(data))],
        "the last byte": [(len(data) - 1, len(data))],
        "empty ones between": [(5, 5), (5, 9), (9, 9), (9, 12), (300_001, 300_001)],
    }
    for kind, ranges in kinds.items():
        parts = read(floor, name, *ranges)
        assert parts == [data[start:stop] for start, stop in ranges], kind


def test_a_range_beyond_the_end_is_told(floor, space):
    name = f"{space}/object"
    floor.create(name, [b"0123456789"])
    for ranges in ([(0, 11)], [(2, 4), (9, 11)], [(10, 11)], [(500, 900)]):
        with pytest.raises(BeyondEnd, match="end"):
            read(floor, name, *ranges)
    assert read(floor, name, (8, 10)) == [b"89"]


@pytest.mark.parametrize("ranges", [[(0, 1)], [(5, 5)], [], [(0, 5), (5, 10)]])
def test_an_object_that_is_not_there_is_told(floor, space, ranges):
    with pytest.raises(NotThere, match=f"object {space}/absent|read {space}/absent"):
        read(floor, f"{space}/absent", *ranges)


def test_what_is_no_range_is_refused(floor, space):
    floor.create(f"{space}/object", [b"0123456789"])
    for start, stop in [(-1, 3), (4, 2)]:
        with pytest.raises(ValueError, match=f"range {start} to {stop}"):
            read(floor, f"{space}/object", (start, stop))


def test_exists_tells_which_of_many_are_there(floor, other_floor, space):
    names = [f"{space}/{number % 7}/{number}" for number in range(100)]
    for name in names[::3]:
        floor.create(name, [b"x"])
    assert other_floor.exists(names) == [number % 3 == 0 for number in range(100)]
    assert floor.exists([]) == []
    assert floor.exists([names[0]]) == [True] and floor.exists([names[1]]) == [False]


def test_a_list_has_names_under_a_prefix_and_sizes(floor, space):
    sizes = {f"{space}/a/{number}": number + 1 for number in range(120)}
    sizes |= {f"{space}/ab/x.y_z=1": 1000, f"{space}/deep/1/2/3/4": 5}
    begin = time.time()
    for name, size in sizes.items():
        floor.create(name, [bytes(size)])

    def listed(prefix):
        return {entry.name: entry.size for entry in floor.list(prefix)}

    assert listed(space) == listed(f"{space}/") == sizes
    assert listed(f"{space}/a") == {n: s for n, s in sizes.items() if n.startswith(f"{space}/a/")}
    assert listed(f"{space}/deep/1") == {f"{space}/deep/1/2/3/4": 5}
    assert listed(f"{space}/nothing") == {}
    assert listed("").items() >= sizes.items()
    times = [entry.modified for entry in floor.list(space)]
    assert all(at is None or begin - 2 <= at <= time.time() + 2 for at in times)


def test_a_deleted_object_is_gone_and_its_name_free(floor, other_floor, space):
    names = [f"{space}/{number}" for number in range(20)]
    for name in names:
        floor.create(name, [b"old"])
    floor.delete([f"{space}/absent", *names[:10], f"{space}/absent2"])
    floor.delete(names[:3])
    floor.delete([])
    assert other_floor.exists(names) == [False] * 10 + [True] * 10
    assert len([*floor.list(space)]) == 10
    assert floor.create(names[0], [b"new"])
    assert read(other_floor, names[0], (0, 3)) == [b"new"]


def test_an_object_of_32_mib_has_the_bytes_of_all_its_parts(floor, other_floor, space):
    head, data = some_bytes(777), np.random.default_rng(3).random(4 * MIB)  # 32 MiB of float64
    whole, name = head + data.tobytes(), f"{space}/large"
    parts = [head, b"", memoryview(data).toreadonly()]
    assert floor.create(name, parts)
    assert read(other_floor, name, (0, len(whole))) == [whole]
    ranges = [(start, start + 100_000) for start in range(0, len(whole) - 100_000, 3 * MIB)]
    assert read(other_floor, name, *ranges) == [whole[start:stop] for start, stop in ranges]


def test_threads_do_not_disturb_one_another(floor, space):
    failures = []

    def work(number):
        try:
            for turn in range(6):
                name, data = f"{space}/{number}/{turn}", some_bytes(200_000 + turn, seed=number)
                assert floor.create(name, [data[:100], data[100:]])
                assert read(floor, name, (0, 50), (1000, len(data))) == [data[:50], data[1000:]]
                shared = read(floor, f"{space}/shared", (number, number + 100_000))
                assert shared == [common[number : number + 100_000]]
                if turn % 2:
                    floor.delete([name])
                assert floor.exists([name, f"{space}/shared"]) == [not turn % 2, True]
        except BaseException as error:
            failures.append(error)

    common = some_bytes(300_000, seed=99)
    floor.create(f"{space}/shared", [common])
    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures
    assert len([*floor.list(space)]) == 8 * 3 + 1


@pytest.mark.parametrize("parts", [1, 2])
def test_buffers_of_a_writer_may_change_once_it_has_written(floor, space, parts):
    data = np.full(100_000, 1, np.uint8)
    for write, name in ((floor.create, f"{space}/created"), (floor.put, f"{space}/put")):
        data[:] = 1
        write(name, np.split(data, parts))
        data[:] = 2
        assert read(floor, name, (0, 100_000)) == [b"\1" * 100_000]


def test_what_is_read_stays_while_it_is_used(floor, other_floor, space):
    data, name = some_bytes(100_000), f"{space}/object"
    floor.create(name, [data])
    with floor.read(name, [(0, 50_000), (70_000, 100_000)]) as buffers:
        other_floor.delete([name])
        other_floor.create(name, [bytes(100_000)])
        read(floor, name, (0, 100_000))
        assert [bytes(buffer) for buffer in buffers] == [data[:50_000], data[70_000:]]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_that_leads_elsewhere_is_refused_by_every_call(floor, name):
    calls = {
        "create": lambda: floor.create(name, [b"x"]),
        "put": lambda: floor.put(name, [b"x"]),
        "read": lambda: read(floor, name, (0, 1)),
        "exists": lambda: floor.exists(["fine", name]),
        "delete": lambda: floor.delete(["fine", name]),
        "list": lambda: [*floor.list(name)],
    }
    if not name or name == "a/":
        del calls["list"]  # a prefix
    for call in calls.values():
        with pytest.raises(ValueError, match="one to eight parts joined"):
            call()


def test_an_object_without_bytes_is_refused(floor, space):
    for parts in ([], [b""], [b"", b""]):
        with pytest.raises(ValueError, match="one byte or more"):
            floor.create(f"{space}/empty", parts)
    assert floor.exists([f"{space}/empty"]) == [False]


def test_nothing_is_left_to_sweep_after_writers_that_ended(floor, space):
    floor.create(f"{space}/object", [b"x"])
    assert floor.sweep(0) == 0
    assert floor.exists([f"{space}/object"]) == [True]


def test_a_closed_floor_refuses_calls_and_may_be_closed_again(floor_url, space):
    floor = open_floor(floor_url)
    floor.exists([f"{space}/a", f"{space}/b"])
    floor.close()
    floor.close()
    for call in (
        lambda: floor.create(f"{space}/a", [b"x"]),
        lambda: read(floor, f"{space}/a", (0, 1)),
        lambda: floor.exists([f"{space}/a", f"{space}/b"]),
        lambda: floor.delete([f"{space}/a"]),
    ):
        with pytest.raises(FloorError, match="closed"):
            call()
