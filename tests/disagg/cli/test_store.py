"""`kvpool store`: what its commands say of stores that pools have written, against what was written
and against the files that lie there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from disagg.cli.store.command import store as app
from disagg.cli.store.gc import parse_age
from kvpool import MHAPool, Shard
from kvpool.cli import app as kvpool
from kvpool.prefix.chain import Chain, token_ids
from tests import oracle
from tests.disagg.store.stores import CHUNK, put, stores
from tests.outputs import output_of
from tests.pools import hybrid, mha, swa

LLAMA = {"model": "llama", "rope": "a", "weights": "w"}
TOKENS = np.random.default_rng(11).integers(0, 900, 6 * CHUNK)
FIRST = TOKENS[: 4 * CHUNK]
SECOND = np.concatenate([TOKENS[: 2 * CHUNK], TOKENS[4 * CHUNK :] + 1])
"""Goes on otherwise after two chunks, for two more."""
BIG = {"num_pages": 60}


def run(*arguments, width=200):
    return CliRunner(env={"COLUMNS": str(width)}).invoke(app, [*map(str, arguments)])


def told(*arguments, status=0):
    done = run(*arguments, "--json")
    assert done.exit_code == status, done.output
    return output_of(f"store {arguments[0]}", done.stdout)


def refused(*arguments, status=2):
    done = run(*arguments)
    assert done.exit_code == status and done.exception is not None, done.output
    return " ".join(done.output.split())


def write(url, pools, tokens, **conventions):
    with stores(url, pools, conventions=conventions) as writing:
        for stop in range(CHUNK, len(tokens) + 1, CHUNK):
            for store, pool in zip(writing, pools):
                put(store, tokens[:stop], oracle.filled(pool, stop))


def keys(tokens):
    chain = Chain(CHUNK)
    chain.append(token_ids(tokens))
    return [key.hex() for key in chain.keys]


@pytest.fixture
def cache(tmp_path):
    """A folder with two prompts of one model, of one rank and of two, and one of another model."""
    url = f"file://{tmp_path}/cache"
    write(url, [mha(**BIG)], FIRST, **LLAMA)
    write(url, [mha(shard=Shard(rank, 2), **BIG) for rank in range(2)], SECOND, **LLAMA)
    write(url, [hybrid(**BIG)], TOKENS[: 3 * CHUNK], model="qwen")
    return Path(url.removeprefix("file://"))


def url_of(cache):
    return f"file://{cache}"


def files(cache, pattern="*"):
    about = {"geometry", "namespace"}
    return [path for path in cache.rglob(pattern) if path.is_file() and not about & {*path.parts}]


def model_of(cache, model):
    (namespace,) = (
        one["namespace"]
        for one in told("ls", url_of(cache))["namespaces"]
        if one["text"]["model"] == model
    )
    return namespace


# ls, show


def test_ls_counts_what_lies_there(cache):
    listed = told("ls", url_of(cache))
    assert [one["text"]["model"] for one in listed["namespaces"]].count("llama") == 1
    by_model = {one["text"]["model"]: one for one in listed["namespaces"]}
    llama, qwen = by_model["llama"], by_model["qwen"]
    assert llama["chunks"] == 6 and qwen["chunks"] == 3 and llama["chunk_tokens"] == CHUNK
    for one in (llama, qwen):
        folder = cache / one["namespace"]
        assert one["objects"] == len(files(folder))
        assert one["bytes"] == sum(path.stat().st_size for path in files(folder))
        text = json.dumps(one["text"], separators=(",", ":"))
        digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        assert digest == one["namespace"]
    first, second = llama["geometries"]
    assert (first["number"], first["ranks"], second["number"], second["ranks"]) == (0, 1, 1, 2)
    assert first["conventions"] == LLAMA
    assert [kind["objects"] for kind in second["kinds"]] == [8]
    assert {k["kind"]: k["objects"] for k in qwen["geometries"][0]["kinds"]} == {
        "full": 3,
        "state": 3,
    }
    assert listed["foreign"] == {"objects": 0, "bytes": 0, "names": []}


@pytest.mark.parametrize("width", [80, 160])
def test_ls_prints_a_table_that_fits(cache, width):
    (cache / "notes.txt").write_text("mine")
    said = run("ls", url_of(cache), width=width)
    assert said.exit_code == 0 and max(map(len, said.stdout.splitlines())) <= max(width, 150)
    table = said.stdout.split("\n", 1)[1].rpartition("foreign")[0]
    assert max(map(len, table.splitlines())) <= width and "…" not in table
    assert "2 namespaces, 18 objects" in said.stdout
    assert "foreign: 1 object, 4 B, such as notes.txt" in said.stdout
    assert re.search(r"llama +6 +0 +full +4 ", said.stdout)


def test_what_a_catalogue_lacks_is_said_to_be_unknown(cache):
    namespace = model_of(cache, "llama")
    (cache / namespace / "geometry" / "00").write_bytes(b"damaged")
    done = run("ls", url_of(cache))
    assert re.search(rf"{namespace[:12]} geometry 0 cannot be read: .* ends at byte 7", done.stderr)
    assert re.search(r"unknown +full +4 ", done.stdout)
    (one,) = (n for n in told("ls", url_of(cache))["namespaces"] if n["namespace"] == namespace)
    assert [geometry["number"] for geometry in one["geometries"]] == [1, None]
    assert one["refused"][0]["number"] == 0


def test_looking_is_no_use(cache):
    before = time.time() - 5000
    for path in files(cache):
        os.utime(path, (before, before))
    assert run("check", url_of(cache)).exit_code == 0
    assert run("ls", url_of(cache), "--html", cache.parent / "page.html").exit_code == 0
    assert all(abs(path.stat().st_mtime - before) < 1 for path in files(cache))


def test_show_of_a_namespace_says_what_all_have_in_common(cache):
    namespace = model_of(cache, "llama")
    done = run("show", url_of(cache), namespace[:6])
    assert done.exit_code == 0 and f"namespace {namespace}: 6 chunks, 12 objects" in done.stdout
    assert "  weights: w\n" in done.stdout and "state k: bfloat16 x 32 a layer" in done.stdout
    assert re.search(r"1: [0-9a-f]{16} +full +2 +18.0 KiB +8 +rope=a", done.stdout)
    assert told("show", url_of(cache), namespace)["namespace"] == namespace


def test_show_of_a_geometry_has_the_layouts_of_its_parts(cache):
    namespace = model_of(cache, "llama")
    geometry = told("show", url_of(cache), f"{namespace[:8]}/geometry/1")
    assert geometry["number"] == 1 and len(geometry["parts"]) == 2
    heads = [
        axis["start"]
        for part in geometry["parts"]
        for axis in part["full"]["layout"]["regions"][0]["axes"]
        if axis["name"] == "head"
    ]
    assert heads == [0, 2]
    said = run("show", url_of(cache), f"{namespace[:8]}/1").stdout
    assert "part 1, full: 9.0 KiB a chunk in 8 blocks" in said and "head 2-3 of 4" in said


def test_show_of_an_object_says_which_tokens_and_what_it_follows(cache):
    key, parent = keys(SECOND)[2], keys(SECOND)[1]
    (path,) = cache.rglob(f"{key}/*.1.full")
    name = path.relative_to(cache).as_posix()
    shown = told("show", url_of(cache), name)
    assert (shown["chunk"], shown["first_token"], shown["tokens"]) == (2, 2 * CHUNK, CHUNK)
    assert (shown["key"], shown["parent"], shown["part"]) == (key, parent, 1)
    assert shown["bytes"] + 112 + 8 * (shown["blocks"] + 1) == path.stat().st_size
    (first,) = cache.rglob(f"{keys(SECOND)[0]}/*.1.full")
    said = run("show", url_of(cache), first.relative_to(cache).as_posix()).stdout
    assert f"full of tokens 0 to {CHUNK - 1}" in said and "it is the first" in said
    shutil.copy(first, path)
    assert "its head is of" in refused("show", url_of(cache), name, status=1)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("zz", "no namespace of this store begins so; it has"),
        ("NAMESPACE/7", "the catalogue has 0, 1."),
        ("NAMESPACE/x", "a geometry has a number from 0 to 63, got 'x'"),
        ("a/b/c/d", "A namespace, or its first digits"),
        ("", "A namespace, or its first digits"),
    ],
)
def test_show_refuses_what_is_not_there(cache, what, reason):
    what = what.replace("NAMESPACE", model_of(cache, "llama"))
    assert reason in refused("show", url_of(cache), what)


# check


def test_check_finds_what_is_not_as_it_was_written(cache):
    damaged, cut, head = files(cache, "*.full")[:3]
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    cut.write_bytes(cut.read_bytes()[:-1])
    data = bytearray(head.read_bytes())
    data[90] ^= 1  # the parent
    head.write_bytes(data)
    (cache / "notes.txt").write_text("mine")
    (cache / "a" / "b").mkdir(parents=True)
    (cache / "a" / "b" / "c").write_text("x")
    found = told("check", url_of(cache), status=1)
    states = {problem["name"]: problem["state"] for problem in found["problems"]}
    names = {path: path.relative_to(cache).as_posix() for path in (damaged, cut, head)}
    assert states == {
        names[damaged]: "damaged",
        names[cut]: "cut",
        names[head]: "damaged",
        "notes.txt": "foreign",
        "a/b/c": "foreign",
    }
    assert found["counts"] == {"sound": 15 + 3 + 2, "damaged": 2, "cut": 1, "foreign": 2, "gone": 0}
    said = run("check", url_of(cache))
    assert said.exit_code == 1
    assert re.search(
        rf"damaged: {names[damaged]}: block 15 of 16 is damaged|block \d+ of", said.stdout
    )
    assert f"cut: {names[cut]}: " in said.stdout and not found["deleted"]
    assert cut.exists()


def test_check_removes_what_no_engine_can_read_and_nothing_else(cache):
    damaged, cut, *others = files(cache, "*.full")
    damaged.write_bytes(b"x" * damaged.stat().st_size)
    cut.write_bytes(b"x")
    (cache / "notes.txt").write_text("mine")
    done = told("check", url_of(cache), "--delete")
    assert sorted(done["deleted"]) == sorted(
        p.relative_to(cache).as_posix() for p in (damaged, cut)
    )
    assert {*files(cache, "*.full")} == {*others} and (cache / "notes.txt").exists()
    assert "removed 0" not in (said := run("check", url_of(cache), "--delete").stdout)
    assert "21 sound, 1 foreign" in said


def test_what_of_an_object_another_store_has_is_no_sound_one(cache):
    one, other = files(cache, "*.full")[:2]
    shutil.copy(one, other)
    assert told("check", url_of(cache), status=1)["counts"]["damaged"] == 1


def test_check_of_one_namespace_reads_that_alone(cache):
    namespace = model_of(cache, "qwen")
    counts = told("check", url_of(cache), "--namespace", namespace[:8])["counts"]
    assert counts["sound"] == 6 + 1


# gc


def used(cache, chunks, ago):
    """Makes chunks of a key look as if they were used so many seconds ago."""
    for key in chunks:
        for path in cache.rglob(f"{key}/*"):
            os.utime(path, (time.time() - ago, time.time() - ago))


def chunks_left(cache):
    return {path.parent.name for path in files(cache)}


@pytest.fixture
def prompts(tmp_path):
    """Two prompts, the second of which goes on otherwise after two chunks."""
    url = f"file://{tmp_path}/prompts"
    write(url, [mha(**BIG)], FIRST)
    write(url, [mha(**BIG)], SECOND)
    return Path(url.removeprefix("file://"))


def test_gc_removes_the_least_recently_used_and_the_deepest_first(prompts):
    first, second = keys(FIRST), keys(SECOND)
    size = files(prompts)[0].stat().st_size
    used(prompts, first, 7200)
    used(prompts, second, 3600)  # and with them the first two of the other
    done = told("gc", url_of(prompts), "--keep", f"{5 * size}b")
    assert done["removed"] == {"chunks": 1, "objects": 1, "bytes": size}
    assert done["kept"] == {"chunks": 5, "bytes": 5 * size}
    assert chunks_left(prompts) == {*first[:3], *second}
    told("gc", url_of(prompts), "--keep", f"{3 * size}b")
    assert chunks_left(prompts) == {*second[:3]}
    assert len([*prompts.rglob("geometry/*")]) == 1
    assert told("gc", url_of(prompts), "--keep", "1b")["kept"] == {"chunks": 0, "bytes": 0}


def test_a_chunk_counts_as_used_when_one_that_follows_was(prompts):
    """The first chunks come from an engine's own cache, and are not read again."""
    first, second = keys(FIRST), keys(SECOND)
    used(prompts, first[:2], 90_000)
    used(prompts, first[2:], 60)
    used(prompts, second[2:], 3600)
    size = files(prompts)[0].stat().st_size
    told("gc", url_of(prompts), "--keep", f"{4 * size}b")
    assert chunks_left(prompts) == {*first}


def test_gc_removes_what_is_older_and_says_so_before(prompts):
    first, second = keys(FIRST), keys(SECOND)
    used(prompts, first, 40 * 86_400)
    used(prompts, second, 86_400)
    would = told("gc", url_of(prompts), "--older", "30d", "--dry-run")
    assert would["dry_run"] and would["removed"]["chunks"] == 2
    assert chunks_left(prompts) == {*first, *second}
    said = run("gc", url_of(prompts), "--older", "30d", "--keep", "1GiB").stdout
    assert "removed 2 chunks, 2 objects, " in said and "kept: 4 chunks" in said
    assert chunks_left(prompts) == {*second}


def test_all_objects_of_a_chunk_go_together(cache):
    told("gc", url_of(cache), "--keep", "100KiB")
    left = chunks_left(cache)
    for key in keys(SECOND)[:2]:
        assert (key in left) == (len([*cache.rglob(f"{key}/*")]) > 0)
    assert sum(path.stat().st_size for path in files(cache)) <= 100 << 10


def test_what_has_no_head_goes_first_among_equals(prompts):
    """Its number in its prompt is not known, and no engine can read it."""
    (path,) = prompts.rglob(f"{keys(FIRST)[0]}/*.full")
    path.write_bytes(b"x" * path.stat().st_size)
    used(prompts, {*keys(FIRST), *keys(SECOND)}, 3600)
    told("gc", url_of(prompts), "--keep", f"{5 * path.stat().st_size}b")
    assert chunks_left(prompts) == {*keys(FIRST)[1:], *keys(SECOND)[1:]}


def test_gc_sweeps_what_killed_writers_left_an_hour_ago(prompts):
    old, new = prompts / "a#1", prompts / "b#1"
    for path, ago in ((old, 7200), (new, 60)):
        path.write_bytes(b"half")
        os.utime(path, (time.time() - ago, time.time() - ago))
    done = run("gc", url_of(prompts), "--keep", "1GiB")
    assert "removed 1 unfinished file of killed writers." in done.stdout
    assert not old.exists() and new.exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "give --keep, how many bytes may stay, or --older, or both."),
        (("--keep", "200"), "--keep '200': a number alone is bytes, of 1,048,576 or more."),
        (("--older", "30"), "--older '30': a number of seconds, minutes, hours, days or weeks"),
        (("--older", "0d"), "--older '0d'"),
    ],
)
def test_gc_refuses_what_it_cannot_mean(prompts, arguments, reason):
    assert reason in refused("gc", url_of(prompts), *arguments)


def test_gc_leaves_mooncake_to_its_master():
    words = refused("gc", "mooncake://nowhere.invalid:50051", "--keep", "1GiB")
    assert "Mooncake's master evicts by itself when memory is full" in words


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("1.5h", 5400), ("30d", 30 * 86_400), ("8 w", 8 * 604_800)]
)
def test_an_age_has_a_unit(text, seconds):
    assert parse_age(text) == seconds


# stores that are not there


@pytest.mark.parametrize("command", [("ls",), ("show", "ab"), ("check",), ("gc", "--keep", "1GiB")])
def test_a_store_that_is_not_there_is_named(tmp_path, command):
    name, *rest = command
    url = f"file://{tmp_path}/none"
    assert refused(name, url, *rest, status=1) == f"{url}: there is no such folder."
    assert not (tmp_path / "none").exists()
    assert "lies in the memory of the process that opened it" in refused(name, "memory://x", *rest)
    assert "one of memory://name, file:///path" in refused(name, "/cache", *rest)


# explain


def layout_file(path, **options):
    sizes = {"layers": range(4), "num_kv_heads": 4, "head_dim": 8, "num_pages": 9, "page_size": 16}
    path.write_text(
        MHAPool(**{"dtype": "bf16", "device": "meta", **sizes, **options}).layout.to_json()
    )
    return path


def test_configurations_that_differ_in_shape_alone_share():
    done = told("explain", "llama_3_1_70b", "llama_3_1_70b", "--tp", "8:4", "--page-size", "16:64")
    assert done["a"]["namespace"] == done["b"]["namespace"]
    assert done["a_to_b"] == done["b_to_a"] == {"shares": True, "reasons": [], "converts": True}
    assert done["a"]["needs"] == ["full: every chunk of 256 tokens."]
    said = run("explain", "llama_3_1_70b", "llama_3_1_70b", "--tp", "8:4").stdout
    assert "what A writes, B can read, where they agree on weights." in said


def test_a_store_is_compared_with_a_layout_and_with_itself(cache, tmp_path):
    namespace = model_of(cache, "llama")
    first, second = (f"{url_of(cache)}/{namespace}/{number}" for number in (0, 1))
    assert told("explain", first, second)["a_to_b"] == {
        "shares": True,
        "reasons": [],
        "converts": True,
    }
    own = tmp_path / "own.json"
    own.write_text(mha(page_size=12, num_pages=9, order="hnd").layout.to_json())
    done = told("explain", first, own)
    assert done["a"]["chunk_tokens"] == done["b"]["chunk_tokens"] == CHUNK
    assert done["a_to_b"]["shares"] and done["b_to_a"]["shares"]
    unsaid = {row["name"] for row in done["namespace"] if row["same"] == "not said"}
    assert unsaid == {"model", "weights"}


def test_ranks_of_one_engine_are_files_joined_by_commas(tmp_path):
    ranks = [layout_file(tmp_path / f"{n}.json", shard=Shard(n, 2)) for n in range(2)]
    whole = layout_file(tmp_path / "whole.json")
    joined = ",".join(map(str, ranks))
    assert told("explain", joined, whole)["a_to_b"]["shares"]
    done = told("explain", ranks[0], whole, status=1)
    assert not done["a_to_b"]["shares"] and done["b_to_a"]["shares"]
    assert "decode needs head" in done["a_to_b"]["reasons"][0]


def test_what_differs_is_named_and_why_no_plan_leads_there(cache):
    llama, qwen = (f"{url_of(cache)}/{model_of(cache, name)}" for name in ("llama", "qwen"))
    done = told("explain", llama, qwen, status=1)
    different = {row["name"] for row in done["namespace"] if row["same"] == "different"}
    assert different >= {"model", "weights", "state temporal"} and "state k" not in different
    assert any("temporal: prefill offers no such region" in r for r in done["a_to_b"]["reasons"])
    assert "model: 'llama' of the writer, 'qwen' of the reader." in done["a_to_b"]["reasons"]
    assert done["b"]["needs"][-1] == "state: one object, of exactly the last chunk."
    done = run("explain", llama, qwen)
    assert "what A writes, B cannot read:\n  other namespaces, which differ in model" in done.stdout


def test_conventions_that_both_say_keep_apart_in_one_namespace(cache):
    write(url_of(cache), [mha(**BIG)], TOKENS[:CHUNK], **{**LLAMA, "rope": "b"})
    namespace = model_of(cache, "llama")
    first, other = (f"{url_of(cache)}/{namespace[:9]}/geometry/{number}" for number in (0, 2))
    done = told("explain", first, other, status=1)
    assert done["a"]["namespace"] == done["b"]["namespace"]
    assert done["a_to_b"]["reasons"] == ["rope: 'a' of the writer, 'b' of the reader."]
    assert [row for row in done["conventions"] if row["same"] == "different"] == [
        {"name": "rope", "first": "a", "second": "b", "same": "different"}
    ]


def test_windows_are_said_in_chunks(tmp_path):
    """Of 21 tokens that end with a chunk of 8, three lie in the third chunk from the end."""
    path = tmp_path / "swa.json"
    path.write_text(swa(**BIG, num_window_pages=60).layout.to_json())
    window = next(s.window for s in swa(**BIG, num_window_pages=60).layout.spaces if s.window)
    for tokens in (4, 8, 24):
        needs = told("explain", path, path, "--chunk-tokens", tokens)["a"]["needs"]
        count = -(-(window - 1) // tokens)
        (line,) = (line for line in needs if line.startswith("window"))
        assert line == f"window: the last {'chunk' if count == 1 else f'{count} chunks'}."


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("CACHE", "llama_3_1_70b"), "give the namespace too, as URL/NAMESPACE"),
        (("CACHE/abcdabcd", "llama_3_1_70b"), "no namespace of this store begins so"),
        (("llama_3_1_70b", "nothing"), "config 'nothing': No such file or directory"),
        (("llama_3_1_70b", "llama_3_1_70b", "--tp", "8:x"), "a number from 1 to 4,096, or A:B"),
    ],
)
def test_what_cannot_be_compared_is_refused(cache, arguments, reason):
    given = (each.replace("CACHE", url_of(cache)) for each in arguments)
    assert reason in refused("explain", *given)


def test_chunks_that_would_cut_items_are_refused():
    words = refused("explain", "deepseek_v4", "deepseek_v4", "--chunk-tokens", "48")
    assert "chunks of 48 tokens would cut its units of 128" in words


# the picture


def test_the_page_draws_branches_where_prompts_part(cache):
    path = cache.parent / "page.html"
    done = run("ls", url_of(cache), "--html", path)
    assert done.exit_code == 0 and done.stderr == f"wrote {path}\n"
    page = path.read_text()
    rows = re.findall(r'<div class="row"><span>(.*?)</span><span class="number">(.*?)</span>', page)
    names = {name.replace("\u00a0", ""): figure for name, figure in rows}
    first, second = keys(FIRST), keys(SECOND)
    stem = f"{first[0][:8]}: 0 to {2 * CHUNK}"
    assert names[stem].startswith("2 chunks, ") and names[stem].endswith("goes on in 2")
    for branch in (first[2], second[2]):
        name = f"\u2514 {branch[:8]}: {2 * CHUNK} to {4 * CHUNK}"
        assert names[name].startswith("2 chunks, ")
    assert page.count(f"state after {3 * CHUNK} tokens") == 1  # of the other model
    assert "geometry 1: 2 ranks" in page and "8 objects" in page


def test_the_page_shows_prefixes_whose_beginning_is_gone(cache):
    for path in cache.rglob(f"{keys(FIRST)[0]}/*"):
        path.unlink()
    damaged = next(iter(cache.rglob(f"{keys(SECOND)[3]}/*.1.full")))
    for path in damaged.parent.iterdir():
        path.write_bytes(b"x" * 500)
    path = cache.parent / "page.html"
    assert run("ls", url_of(cache), "--html", path).exit_code == 0
    page = path.read_text()
    assert page.count("a prefix that is not there: no hit ends here") == 2
    assert f"{keys(SECOND)[3][:16]}: no head can be read" in page


def test_a_page_that_cannot_be_written_is_refused_before_reading(cache):
    words = refused("ls", url_of(cache), "--html", cache / "none" / "page.html")
    assert "there is no such directory" in words


# help


@pytest.mark.parametrize("command", ["ls", "show", "check", "explain", "gc", "serve"])
def test_help_has_an_example_and_what_json_has(command):
    done = run(command, "--help")
    assert done.exit_code == 0 and f"kvpool store {command} " in done.stdout
    assert "JSON:" in done.stdout


def test_the_commands_are_listed_under_kvpool():
    done = CliRunner().invoke(kvpool, ["--help"])
    assert done.exit_code == 0
    done = run("--help")
    assert all(name in done.stdout for name in ("ls", "show", "check", "explain", "gc", "serve"))
