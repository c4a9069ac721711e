"""Nothing in a file is trusted: what is not as `save` writes it is refused by name, and the pool is
untouched.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
import time
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings, strategies as st

from disagg import IncompatibleLayouts, IncompleteTransfer
from disagg.snapshot import SnapshotRefused, check, inspect, load, save
from disagg.snapshot.header import MAX_HEADER
from kvpool import Shard
from tests import oracle
from tests.disagg.snapshot.folders import saved
from tests.pools import hybrid, mha, mla

TOKENS = 13
COVERED = ("kvpool_snapshot", "tokens", "request", "conventions", "layout", "digests")


@lru_cache
def sound(build=mla):
    """A file's header as an object, and its data."""
    pool = build()
    address = oracle.filled(pool, TOKENS, 1)
    with saved([pool], [address], conventions={"vocab_size": 7}) as (path,):
        data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return data[8 : 8 + length], data[8 + length :]


def header():
    return json.loads(sound()[0])


def packed(said, data=None, seal=True):
    """A file of a header; `seal`: with the checksum that its values should have."""
    about = said.get("__metadata__") if isinstance(said, dict) else None
    if seal and isinstance(about, dict) and {*COVERED} <= {*about}:
        text = json.dumps([about[name] for name in COVERED], separators=(",", ":"))
        about["checksum"] = hashlib.sha256(text.encode()).hexdigest()
    text = json.dumps(said).encode()
    return struct.pack("<Q", len(text)) + text + (sound()[1] if data is None else data)


@contextmanager
def file_of(data):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(data)
        yield path


def refusal(data, kinds=SnapshotRefused):
    """What load says of a file, or None; the pool is then as it was, or holds the state."""
    pool = mla()
    oracle.blank(pool)
    address = oracle.place(pool, TOKENS, 2)
    with file_of(data) as path:
        try:
            load(path, pool.layout, address)
        except kinds as error:
            assert all((memory == oracle.DEST).all() for memory in oracle.state(pool).memory)
            if isinstance(error, SnapshotRefused):
                assert str(error).startswith(f"{path}: ") and len(str(error).encode()) < 6000
            return str(error)
    oracle.assert_holds(pool, address)
    return None


def edited(*path, to):
    """A header with another value at a path of names; `to` may be a function of the old one."""
    said = header()
    at = said
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = to(at.get(path[-1])) if callable(to) else to
    return said


def without(*path):
    said = header()
    at = said
    for name in path[:-1]:
        at = at[name]
    del at[path[-1]]
    return said


def layout(**more):
    """A header with another layout: values, or functions of the old ones, by dotted names."""
    said = header()
    held = json.loads(said["__metadata__"]["layout"])
    for path, value in more.items():
        at, names = held, path.split("__")
        for name in names[:-1]:
            at = at[int(name) if name.isdigit() else name]
        at[names[-1]] = value(at[names[-1]]) if callable(value) else value
    said["__metadata__"]["layout"] = json.dumps(held)
    return said


META, T = "__metadata__", "target.0.latent"
HEADERS = {
    "no header": ([], "header: a JSON object, got list"),
    "no metadata": (without(META), "not a kvpool snapshot: its __metadata__ has no kvpool_snapsh"),
    "metadata is no object": (edited(META, to=[]), "not a kvpool snapshot"),
    "version": (edited(META, "kvpool_snapshot", to="2"), "version '2': this kvpool reads version"),
    "unknown metadata": (edited(META, "owner", to="me"), "__metadata__: unknown 'owner'"),
    "metadata type": (edited(META, "layout", to={}), "__metadata__ layout: a text, got {}"),
    "tokens": (edited(META, "tokens", to="0"), "tokens '0': 1 to 16777216"),
    "tokens in digits of others": (edited(META, "tokens", to="१३"), "tokens '१३': 1 to"),
    "another token count": (edited(META, "tokens", to="14"), "layout buffers 0 items: 13, in a"),
    "request": (edited(META, "request", to="a\nb"), "request 'a\\nb': at most 128 printable"),
    "conventions": (edited(META, "conventions", to="[1]"), "conventions: a JSON object, got list"),
    "convention": (edited(META, "conventions", to='{"a":null}'), "conventions: a=None: a number"),
    "no layout": (edited(META, "layout", to="{}"), "layout: malformed layout: Object missing"),
    "layout version": (layout(version=9), "layout: layout version 9: this kvpool reads version 1"),
    "generation": (layout(generation="x"), "layout generation: 'x', in a file of"),
    "items": (layout(buffers__0__items=9), "layout"),
    "missing tensor": (without(T), "tensors: missing 'target.0.latent'"),
    "no tensor": (edited(T, to=3), "tensors target.0.latent: 3"),
    "unknown of a tensor": (edited(T, "strides", to=[1]), "target.0.latent: unknown 'strides'"),
    "dtype": (edited(T, "dtype", to="F16"), "dtype: 'F16', in a file of these tokens 'BF16'"),
    "shape type": (edited(T, "shape", to=[13.0, 16]), "shape 0: 13.0, in a file of"),
    "offsets": (edited(T, "data_offsets", to=[0, 1 << 60]), "data_offsets 1: 1152921504606846"),
    "no digest": (edited(META, "digests", to="{}"), "digests: missing 'target.0.latent'"),
    "digest": (
        edited(META, "digests", to=lambda text: text.replace('":"', '":"g', 1)),
        "digest of target.0.latent: 16 hex digits",
    ),
    "wrong digests": (
        edited(META, "digests", to=lambda t: json.dumps(dict.fromkeys(json.loads(t), "0" * 16))),
        "target layers 0-3 latent; target layers 0-3 rope: not the bytes that were saved",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADERS)
def test_what_save_does_not_write_is_refused_by_name(case):
    said, says = HEADERS[case]
    assert says in refusal(packed(said))


def test_a_sound_file_is_taken_however_its_header_is_written():
    assert refusal(packed(header())) is None
    text = json.dumps(dict(reversed(header().items())), indent=2).encode()
    assert refusal(struct.pack("<Q", len(text)) + text + sound()[1]) is None


@pytest.mark.parametrize("name", COVERED[1:])
def test_a_changed_value_without_its_checksum_is_refused(name):
    said = edited(META, name, to=lambda text: text.replace("1", "2") + " ")
    assert "The header is damaged" in refusal(packed(said, seal=False))


def whole():
    return packed(header())


FILES = {
    "empty": (lambda: b"", "0 bytes: too short"),
    "short": (lambda: whole()[:7], "7 bytes: too short"),
    "length alone": (lambda: whole()[:8], "its header would be"),
    "header cut": (lambda: whole()[:400], "and the file has 400"),
    "a long header": (lambda: struct.pack("<Q", MAX_HEADER + 8) + bytes(99), "its header would be"),
    "an endless header": (lambda: b"\xff" * 99, "its header would be 18446744073709551615 bytes"),
    "data cut": (lambda: whole()[:-1], "2495 bytes of data, its tensors have 2496"),
    "no data": (lambda: whole()[:-2496], "0 bytes of data, its tensors have 2496"),
    "data added": (lambda: whole() + b"x", "2497 bytes of data, its tensors have 2496"),
    "no JSON": (lambda: struct.pack("<Q", 8) + b"{,     }", "header: malformed JSON"),
    "no UTF-8": (lambda: struct.pack("<Q", 8) + b'{"\xff": 1}'[:8], "header: 'utf-8' codec"),
    "deep": (lambda: struct.pack("<Q", 200_000) + b"[" * 200_000, "header: nested too deeply"),
    "twice": (lambda: struct.pack("<Q", 17) + b'{"a": 1, "a": 2} ', "header: 'a' is there twice"),
    "a flipped bit": (
        lambda: whole()[:-1] + bytes([whole()[-1] ^ 1]),
        "target layer 3 rope: not the bytes that were saved",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_is_cut_or_damaged_is_refused(case):
    make, says = FILES[case]
    assert says in refusal(make())


def test_of_a_hundred_thousand_names_the_one_that_is_there_twice_is_named_at_once():
    names = [f'"{number}":1' for number in range(100_000)]
    text = "{" + ",".join([*names, '"99999":2']) + "}"
    began = time.thread_time()
    assert "header: '99999' is there twice" in refusal(struct.pack("<Q", len(text)) + text.encode())
    assert time.thread_time() - began < 5  # it took minutes


def test_every_length_of_a_cut_file_is_refused():
    data = whole()
    for size in [*range(64), *range(64, len(data), 97)]:
        assert refusal(data[:size])


@pytest.mark.parametrize("depth", [90, 300, *range(700, 1000, 9), 3000, 30_000])
def test_a_header_may_be_as_deep_as_it_likes(depth):
    """What one part of a reader takes, another may not."""
    deep = "[" * depth + "]" * depth
    for said in (
        edited(T, "shape", to="?"),
        edited("weight", to="?"),
        edited(META, "layout", to="?"),
    ):
        text = json.dumps(said).replace('"?"', deep).encode()
        assert refusal(struct.pack("<Q", len(text)) + text + sound()[1])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from([0, 1, -1, 1 << 31, 1 << 62, 1 << 63, 1 << 64, 10**400, "", "0", "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)  # fmt: skip


def mutate(value, draw):
    """Another value somewhere in a JSON document; texts that are JSON themselves are entered."""
    if isinstance(value, dict | list) and value and draw(st.integers(0, 9)):
        at = draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
        match draw(st.integers(0, 9)):
            case 0:
                del value[at]
            case 1 if isinstance(value, dict):
                value[draw(st.text(max_size=5))] = value[at]
            case 1:
                value.append(value[at])
            case _:
                value[at] = mutate(value[at], draw)
        return value
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            return json.dumps(mutate(json.loads(value), draw))
        except ValueError:
            return value
    if isinstance(value, int) and draw(st.booleans()):
        return value + draw(st.sampled_from([-1, 1, 8, 1 << 40, -value]))
    return draw(JSON)


@settings(max_examples=250)
@given(st.data())
def test_a_mangled_header_is_refused_or_harmless(data):
    said = header()
    for _ in range(data.draw(st.integers(1, 3))):
        said = mutate(said, data.draw)
    kinds = SnapshotRefused, IncompatibleLayouts, IncompleteTransfer
    says = refusal(packed(said, seal=data.draw(st.booleans())), kinds)
    if says is None:  # nothing but what is not about the bytes has changed
        before, after = header(), said
        for each in (before, after):
            for name in ("request", "conventions", "checksum", "digests", "layout"):
                each[META].pop(name)
        assert after == before


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SnapshotRefused, match="pipe: not a regular file"):
        inspect(tmp_path / "pipe")
    with pytest.raises(SnapshotRefused, match="not a regular file"):
        inspect(tmp_path)
    with pytest.raises(FileNotFoundError):
        inspect(tmp_path / "none")


def test_damage_in_the_last_file_leaves_the_pool_untouched():
    halves = [hybrid(shard=Shard(rank, 2)) for rank in range(2)]
    addresses = [oracle.filled(half, TOKENS, seed) for seed, half in enumerate(halves)]
    dest = hybrid()
    oracle.blank(dest)
    into = oracle.place(dest, TOKENS, 5)
    with saved(halves, addresses) as paths:
        data = bytearray(paths[1].read_bytes())
        data[-1] ^= 1
        paths[1].write_bytes(data)
        assert inspect(paths[1]).tokens == TOKENS
        for call in (lambda: check(paths[1]), lambda: load(paths, dest.layout, into)):
            with pytest.raises(SnapshotRefused, match=r"1\.kv: target layer 3 v: not the bytes"):
                call()
    assert all((memory == oracle.DEST).all() for memory in oracle.state(dest).memory)


def test_files_of_different_requests_or_models_are_refused(tmp_path):
    def rank(number, name, tokens=TOKENS, request="r", model="", **conventions):
        pool = mha(shard=Shard(number, 2), model=model)
        address = oracle.place(pool, tokens)
        save(tmp_path / name, pool.layout, address, request=request, conventions=conventions)
        return tmp_path / name

    pool = mha(model="one")
    into = oracle.place(pool, TOKENS)
    first = rank(0, "first", model="one", vocab_size=7, rope="yarn")
    for says, other in (
        ("other: request 'q', in .*first 'r'", {"request": "q"}),
        ("other: tokens 12, in .*first 13", {"tokens": 12}),
        ("other: model 'two', in .*first 'one'", {"model": "two"}),
        ("other: vocab_size 8, in .*first 7", {"vocab_size": 8}),
    ):
        paths = [first, rank(1, "other", **{"model": "one", **other})]
        with pytest.raises(SnapshotRefused, match=says):
            load(paths, pool.layout, into)
    nameless = [rank(number, f"{number}", request="") for number in range(2)]
    with pytest.raises(SnapshotRefused, match="it names no request"):
        load(nameless, pool.layout, into)
    second = rank(1, "second", model="one", head_dim=4)
    load([first, second], pool.layout, into, conventions={"vocab_size": 7, "revision": "x"})
    with pytest.raises(SnapshotRefused, match="first: rope 'yarn', here 'default'"):
        load([first, second], pool.layout, into, conventions={"rope": "default"})
    with pytest.raises(SnapshotRefused, match="second: head_dim 4, here 8"):
        load([first, second], pool.layout, into, conventions={"head_dim": 8})
    other = mha(model="two")
    with pytest.raises(SnapshotRefused, match="state of model 'one', this is 'two'"):
        load([first, second], other.layout, into)
    with pytest.raises(IncompatibleLayouts, match="layers 0-3 k: decode needs head 0-3, prefill"):
        load(first, pool.layout, into)
    longer = oracle.place(pool, TOKENS + 1)
    with pytest.raises(SnapshotRefused, match="first: it has 13 tokens, the block table 14"):
        load([first, second], pool.layout, longer)


def truncated(path):
    os.truncate(path, path.stat().st_size - 100)
    return "cut off while it was loaded"


def unreadable(path):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def touched(path):
    os.utime(path, ns=(0, 0))
    return "written to while it was loaded"


@pytest.mark.parametrize("fails", [truncated, unreadable, touched])
def test_whenever_a_file_fails_the_error_says_whether_items_were_written(
    fails, tmp_path, monkeypatch
):
    pool, real, reads, says = mla(), os.preadv, [], []
    address = oracle.filled(pool, TOKENS)
    save(path := tmp_path / "a", pool.layout, address)
    whole, at = path.read_bytes(), 0

    def preadv(*args):
        reads.append(args)
        if len(reads) == at:
            says.append(fails(path))
        return real(*args)

    monkeypatch.setattr(os, "preadv", preadv)
    load(path, pool.layout, address)
    every, said = len(reads), set()
    for number in range(2, every + 1):  # the first reads the length of the header
        at = number
        path.write_bytes(whole)
        reads.clear()
        oracle.blank(pool)
        with pytest.raises((SnapshotRefused, OSError)) as caught:
            load(path, pool.layout, address)
        written = any((memory != oracle.DEST).any() for memory in oracle.state(pool).memory)
        assert ("items now must not be used" in str(caught.value)) >= written
        said.add(written)
        if written:
            assert caught.type is SnapshotRefused and str(caught.value).startswith(f"{path}: ")
            assert says[-1:] == [] or says[-1] in str(caught.value)
    assert True in said and (fails is touched or False in said)


@settings(max_examples=100)
@given(st.data())
def test_mangled_bytes_are_refused_or_change_nothing(data):
    mangled = bytearray(whole())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(mangled) - 1))
        match data.draw(st.integers(0, 2)):
            case 0:
                mangled[at] ^= 1 << data.draw(st.integers(0, 7))
            case 1:
                del mangled[at : at + data.draw(st.integers(1, 99))]
            case 2:
                mangled[at:at] = data.draw(st.binary(max_size=20))
    says = refusal(bytes(mangled))  # else all bytes have arrived
    assert says or mangled[-2496:] == whole()[-2496:]
