"""`kvpool explain`: ranks of models and files, bytes by hand, reasons by rank, what is drawn."""

from __future__ import annotations

import json
import re
from itertools import product

import pytest
from hypothesis import given, strategies as st
from typer.testing import CliRunner

from disagg.cli.picture import STAYS, pieces
from disagg.cli.sides import parse_link
from kvpool import MHAPool, Shard
from kvpool.cli import app
from kvpool.layout import Axis, Region

LLAMA = 80 * 2 * 128 * 2  # bytes of a token and head: layers, k and v, a head of bfloat16
COMMON = {"layers": range(4), "num_kv_heads": 4, "head_dim": 8, "num_pages": 9, "page_size": 16}


def run(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["explain", *map(str, arguments)])


def told(*arguments, status=0):
    done = run(*arguments, "--json")
    assert done.exit_code == status, done.output
    return json.loads(done.stdout)


def write(path, **changes):
    given = {"dtype": "bf16", "device": "meta", **COMMON, **changes}
    path.write_text(MHAPool(**given).layout.to_json())
    return path


# ranks and bytes


@pytest.mark.parametrize(
    ("options", "ranks", "received", "sent"),
    [
        ([], (1, 1), [8], [8]),
        (["--tp", 2], (2, 2), [4, 4], [4, 4]),
        (["--tp", "8:4", "--page-size", "64:16"], (8, 4), [2] * 4, [1] * 8),
        (["--tp", "2:4", "--pp", "2:1"], (4, 4), [2] * 4, [2] * 4),
        (["--tp", "4:1", "--pp", "1:2"], (4, 2), [4, 4], [2] * 4),
        (["--tp", "16:1"], (16, 1), [8], [0.5] * 16),  # 2 ranks hold each head
        (["--tp", "1:16"], (1, 16), [1] * 16, [16]),
    ],
)
def test_every_rank_of_a_model_gets_its_heads_and_layers(options, ranks, received, sent):
    """In units of the bytes of one head in all layers."""
    found = told("llama_3_1_70b", "--tokens", 100, *options)
    assert (len(found["prefill"]), len(found["decode"])) == ranks
    by_rank = {n: each["bytes"] for each in found["plans"] for n in each["decode"]}
    unit = 100 * LLAMA
    assert [by_rank[n] / unit for n in range(ranks[1])] == received
    assert [each / unit for each in found["sent"]] == sent
    assert found["refused"] == []


def test_a_model_is_explained_as_the_files_of_its_ranks_are(tmp_path):
    """What `describe` writes of each rank, `explain` plans as it does the model."""
    for rank in range(2):
        words = ["describe", "qwen3_235b", "--tp", "2", "--rank", str(rank), "--json"]
        (tmp_path / f"{rank}").write_text(CliRunner().invoke(app, words).stdout)
    words = ["describe", "qwen3_235b", "--page-size", "16", "--json"]
    (tmp_path / "whole").write_text(CliRunner().invoke(app, words).stdout)
    files = told(*(tmp_path / name for name in ("0", "1", "whole")))
    model = told("qwen3_235b", "--tp", "2:1", "--page-size", "64:16")
    assert files["plans"] == model["plans"] and files["sent"] == model["sent"]
    mixed = told("qwen3_235b", tmp_path / "whole", "--tp", "2:", "--page-size", "64:")
    assert mixed["plans"] == model["plans"]


def test_the_last_stage_has_the_draft_layers():
    """A row of 512 and 64 bfloat16, and an index key of 128 e4m3 with its scale."""
    found = told("deepseek_v32", "--draft", "--pp", "1:2", "--tokens", 64)
    first, last = ([row for row in each["rows"] if row["bytes"]] for each in found["plans"])
    assert {(row["owner"], row["layers"][-1]) for row in first} == {("target", 30)}
    assert {(row["owner"], row["layers"][-1]) for row in last} == {("target", 60), ("draft", 61)}
    drafts = [row["bytes"] for row in last if row["owner"] == "draft"]
    assert sum(drafts) == 64 * ((512 + 64) * 2 + 128 + 4)


def test_a_draft_that_prefill_lacks_is_refused(tmp_path):
    words = ["describe", "deepseek_v3", "--json"]
    (tmp_path / "p.json").write_text(CliRunner().invoke(app, words).stdout)
    refused = told(tmp_path / "p.json", "deepseek_v3", "--draft", status=1)["refused"]
    lacking = [each["reason"].partition(":")[0] for each in refused]
    assert lacking == ["draft layer 61 latent", "draft layer 61 rope"]
    (tmp_path / "p.json").write_text(CliRunner().invoke(app, [*words, "--draft"]).stdout)
    assert told(tmp_path / "p.json", "deepseek_v3", "--draft")["refused"] == []


def test_a_table_names_the_decode_ranks_that_it_is_of():
    said = run("llama_3_1_70b", "--tp", "4:2", "--pp", "1:2", "--tokens", 64).stdout
    assert "decode llama_3_1_70b ranks 0-1, each: plan for 64 tokens" in said
    assert "decode llama_3_1_70b ranks 2-3, each: plan for 64 tokens" in said


# the link


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("400Gb", 50e9),
        ("400 Gb/s", 50e9),
        ("400Gbps", 50e9),
        ("0.4Tb", 50e9),
        ("25Gbit", 3.125e9),
        ("50GB", 50e9),
        ("900MB/s", 9e8),
    ],
)
def test_a_link_is_bits_or_bytes_a_second(text, rate):
    assert parse_link(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["", "400", "400G", "400gb", "0Gb", "-1Gb", "4e2Gb", "400 GiB"])
def test_a_link_that_is_ambiguous_is_refused(text):
    done = run("llama_3_1_70b", f"--link={text}")
    assert done.exit_code == 2 and "bits a second such as 400Gb" in done.output


@pytest.mark.parametrize(
    ("tp", "heads", "who"),
    [("8:4", 2, "decode llama_3_1_70b rank 0"), ("2:8", 4, "prefill llama_3_1_70b rank 0")],
)
def test_the_time_on_the_wire_is_of_the_busiest_rank(tp, heads, who):
    options = ("llama_3_1_70b", "--tp", tp, "--link", "400Gb", "--tokens", 1000)
    nbytes = heads * 1000 * LLAMA
    assert told(*options)["seconds"] == pytest.approx(nbytes * 8 / 400e9)
    said = " ".join(run(*options).stdout.split())
    assert f"on the wire: {1e3 * nbytes / 50e9:.4g} ms at 400 Gb/s a rank" in said
    assert re.search(rf"{nbytes:,} bytes are (received|sent) by {who}", said)


# reasons


def test_a_reason_names_the_files_that_it_is_about(tmp_path):
    """Of four shards one is missing and one is of another dtype."""
    for rank in (0, 1, 3):
        dtype = "f32" if rank == 1 else "bf16"
        write(tmp_path / f"p{rank}.json", shard=Shard(rank, 4), dtype=dtype)
    write(tmp_path / "d.json")
    files = [tmp_path / name for name in ("p0.json", "p1.json", "p3.json", "d.json")]
    done = run(*files)
    assert done.exit_code == 1
    line = f"refused: prefill {files[1]} -> decode {files[3]}: target layers 0-3 k: float32 on"
    assert line in done.stdout
    write(files[1], shard=Shard(1, 4))
    done = run(*files)
    every = ", ".join(map(str, files[:3]))
    line = f"refused: prefill {every} -> decode {files[3]}: target layers 0-3 k: decode needs head"
    assert line in done.stdout and "prefill offers head 0; head 1; head 3" in done.stdout


def test_a_reason_names_the_ranks_that_it_is_about():
    """Each of decode's stages wants states that prefill has not; each rank another dtype."""
    deeper = told("deepseek_v3", "kimi_linear_48b", "--pp", "1:3", status=1)
    assert {each["prefill"] for each in deeper["refused"]} == {"prefill deepseek_v3"}
    ranks = {f"decode kimi_linear_48b rank {n}" for n in range(3)}
    assert {each["decode"] for each in deeper["refused"]} == ranks
    other = told("llama_3_1_70b", "--tp", "4:2", "--packing", "bf16:fp8", status=1)
    assert [each["decode"] for each in other["refused"]] == ["decode llama_3_1_70b ranks 0-1"] * 2
    words = "target layers 0-79 k: bfloat16 on prefill, float8_e4m3fn on decode."
    assert other["refused"][0]["reason"].startswith(words)
    assert other["refused"][0]["prefill"] == "prefill llama_3_1_70b ranks 0-3"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["FILE"], "give at least two layouts: the prefill ranks', then decode's."),
        (["FILE", "FILE", "--tp", "2"], "cannot change a layout file. Leave prefill's out"),
        (["llama_3_1_70b", "FILE", "--tp", "2"], "cannot change a layout file. Leave decode's out"),
        (["llama_3_1_70b", "--tp", "8:x"], "--tp 'x': a number from 1 to 4,096, or PREFILL:DECODE"),
        (["llama_3_1_70b", "--tp", "8:4:2"], "--tp '4:2': a number from 1"),
        (["llama_3_1_70b", "--pp", "0"], "--pp '0': a number from 1"),
        (["llama_3_1_70b", "--tp", "3"], "8 heads cannot be split over 3 ranks"),
        (["llama_3_1_70b", "--pp", "1:81"], "81 stages for 80 layers"),
        (["llama_3_1_70b", "--tp", "4096", "--pp", "2"], "8,192 ranks, at most 4,096"),
        (["llama_3_1_70b", "--packing", "bf16:fp9"], "dtype 'fp9': one of bf16"),
        (["llama_3_1_70b", "--draft"], "llama_3_1_70b: the config has no draft layers."),
        (["FILE", "FILE", "--draft"], "--draft cannot change layout files."),
    ],
)
def test_what_cannot_be_asked_is_refused_with_a_sentence(tmp_path, arguments, reason):
    file = write(tmp_path / "layout.json")
    done = run(*(file if each == "FILE" else each for each in arguments))
    assert done.exit_code == 2 and reason in " ".join(done.output.split())


# the picture


def bytes_of(region, steps=None):
    """Offsets in an item, by the formula of kvpool.layout; `steps` of an axis by name, if not
    all, as the model counts them.
    """
    ranges = [(steps or {}).get(a.name, range(a.start, a.start + a.size)) for a in region.axes]
    return {
        region.offset + sum((n - a.start) * a.stride for n, a in zip(at, region.axes)) + byte
        for at in product(*ranges)
        for byte in range(region.width)
    }


spans = st.tuples(st.integers(0, 5), st.integers(1, 3)).map(lambda s: (s[0], s[0] + s[1]))


@given(st.lists(st.tuples(spans, spans), max_size=4), st.booleans())
def test_what_travels_of_a_region_is_cut_out_to_the_byte(boxes, swapped):
    strides = (4, 24) if swapped else (20, 4)
    axes = (Axis("entry", 3, 144), Axis("head", 4, strides[0], 1, 6), Axis("dim", 5, strides[1]))
    region = Region("target", 0, "k", "b", 8, "uint8", axes, 2)
    boxes = [(("head", *heads), ("dim", *dims)) for heads, dims in boxes]
    inside = set()
    for (_, *heads), (_, *dims) in boxes:
        held = {
            "head": set(range(*heads)) & set(range(1, 5)),
            "dim": set(range(*dims)) & {*range(5)},
        }
        inside |= bytes_of(region, held)
    parts = [(bytes_of(part), moves) for part, moves in pieces(region, boxes)]
    assert sum(len(held) for held, _ in parts) == len(bytes_of(region))  # none of them twice
    assert set().union(*(held for held, moves in parts if moves)) == inside
    assert set().union(*(held for held, moves in parts if not moves)) == bytes_of(region) - inside


def test_both_sides_are_drawn_with_what_travels_in_one_colour(tmp_path):
    """Of prefill's 4 heads a rank two travel to decode's first: of each entry its first half."""
    path = tmp_path / "plan.html"
    done = run("llama_3_1_70b", "--tp", "2:4", "--html", path)
    assert done.exit_code == 0 and done.stderr == f"wrote {path}\n"
    page = path.read_text()
    prefill, decode = re.findall(r"<h3>(.*?)</h3>(.*?)(?=<h3>|</body>)", page, re.S)
    assert (prefill[0], decode[0]) == (
        "prefill llama_3_1_70b rank 0",
        "decode llama_3_1_70b rank 0",
    )
    box = r'<rect [^>]*fill="([^"]+)" data-from="(\d+)" data-to="(\d+)"'
    seen = [
        [(c, int(a), int(b)) for c, a, b in re.findall(box, side[1])] for side in (prefill, decode)
    ]
    entry = 4 * 128 * 2
    ours = {colour for colour, start, _ in seen[0] if start % entry < entry // 2}
    rest = {colour for colour, start, _ in seen[0] if start % entry >= entry // 2}
    assert rest == {STAYS} and len(ours) == 2 and STAYS not in ours  # k and v
    assert {colour for colour, _, _ in seen[1]} == ours
    for colour in ours:
        assert f"background:{colour}" in page
    assert "Filled alike: decode llama_3_1_70b ranks 1-3." in page


def test_layers_that_do_not_travel_are_said_and_not_drawn(tmp_path):
    path = tmp_path / "plan.html"
    assert run("llama_3_1_70b", "--pp", "1:2", "--html", path).exit_code == 0
    page = path.read_text()
    assert "<b>target k: layers 40-79</b>: nothing travels" in page
    assert "<b>target v: layers 0-39</b>: nothing travels" in page
    assert page.count("<svg") == 2 * 2 * 2  # k and v, of both sides, to two ranks
