"""`kvpool explain`: ranks of models and files, bytes by hand, reasons by rank, what is drawn."""

from __future__ import annotations

import json
import re
from itertools import product

import pytest
from hypothesis import given, strategies as st
from typer.testing import CliRunner

from disagg.cli.picture import STAYS, pieces, shade
from disagg.cli.sides import parse_link
from kvpool import MHAPool, Shard
from kvpool.cli import app
from kvpool.layout import Axis, Region
from tests.outputs import output_of

LLAMA = 80 * 2 * 128 * 2  # bytes of a token and head: layers, k and v, a head of bfloat16
COMMON = {"layers": range(4), "num_kv_heads": 4, "head_dim": 8, "num_pages": 9, "page_size": 16}


def run(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["explain", *map(str, arguments)])


def told(*arguments, status=0):
    done = run(*arguments, "--json")
    assert done.exit_code == status, done.output
    return output_of("explain", done.stdout)


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
    assert f"on the wire: at least {1e3 * nbytes / 50e9:.4g} ms at 400 Gb/s a rank" in said
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
        (["llama_3_1_70b", "--draft"], "llama_3_1_70b: the config has no draft layers: "),
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
    senders = {byte: set() for byte in bytes_of(region)}
    travels = []
    for source, (heads, dims) in enumerate(boxes):
        travels.append(((("head", *heads), ("dim", *dims)), source))
        steps = {
            "head": set(range(*heads)) & set(range(1, 5)),
            "dim": set(range(*dims)) & {*range(5)},
        }
        for byte in bytes_of(region, steps):
            senders[byte].add(source)
    parts = [(bytes_of(part), sources) for part, sources in pieces(region, travels)]
    assert sum(len(part) for part, _ in parts) == len(senders)  # none of them twice
    for part, sources in parts:
        assert all(senders[byte] == set(sources) for byte in part)


BOX = re.compile(
    r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="[\d.]+" '
    r'(?:fill="([^"]+)"|class="gap") data-from="(\d+)" data-to="(\d+)"'
)


def drawn(path, *arguments):
    """A page, and the boxes of each heading on it: x, width, colour, first byte, end."""
    done = run(*arguments, "--html", path)
    assert done.exit_code == 0 and done.stderr == f"wrote {path}\n", done.output
    page = path.read_text()
    sides = re.findall(r"<h3>(.*?)</h3>(.*?)(?=<h3>|<h2>|</body>)", page, re.S)
    boxes = {
        name: [
            (float(x), float(width), colour, int(start), int(end))
            for x, width, colour, start, end in BOX.findall(body)
        ]
        for name, body in sides
    }
    return page, boxes


def legend_of(page):
    """Words by colour."""
    return dict(re.findall(r'background:([^"]+)"></i>([^<]*)</li>', page))


def test_what_travels_has_the_colour_of_its_source_on_both_sides(tmp_path):
    """Of decode's two heads a rank the first is of one prefill rank, the second of the next."""
    page, boxes = drawn(tmp_path / "plan.html", "llama_3_1_70b", "--tp", "8:4")
    colours = {words: colour for colour, words in legend_of(page).items()}
    names = [f"prefill llama_3_1_70b rank {n}" for n in range(2)]
    assert [*colours] == [*names, "stays"] and len(legend_of(page)) == 3
    for name in names:
        assert {box[2] for box in boxes[name]} == {colours[name]}
    head = 128 * 2
    for _, _, colour, start, end in boxes["decode llama_3_1_70b rank 0"]:
        assert colour == colours[names[start // head % 2]] and end - start == head
    assert "Filled alike: decode llama_3_1_70b ranks 1-3." in page


def test_what_stays_is_grey(tmp_path):
    """Of prefill's 4 heads a rank two travel to decode's first: of each entry its first half."""
    _, boxes = drawn(tmp_path / "plan.html", "llama_3_1_70b", "--tp", "2:4")
    entry = 4 * 128 * 2
    prefill = boxes["prefill llama_3_1_70b rank 0"]
    travels = {colour for _, _, colour, start, _ in prefill if start % entry < entry // 2}
    assert {c for _, _, c, start, _ in prefill if start % entry >= entry // 2} == {STAYS}
    assert len(travels) == 1 and STAYS not in travels
    assert {colour for _, _, colour, *_ in boxes["decode llama_3_1_70b rank 0"]} == travels


@pytest.mark.parametrize("options", [["--tp", "2:1", "--page-size", "64:16"], ["--order", "hnd:"]])
def test_a_page_has_one_scale_and_a_bar_of_it(tmp_path, options):
    """Boxes of pages, of convolutions and of temporal states, beside a bar of so many bytes."""
    page, boxes = drawn(tmp_path / "plan.html", "qwen3_next_80b", *options)
    bar = re.search(r'width="([\d.]+)" height="[\d.]+" fill="[^"]+" data-bytes="(\d+)"', page)
    byte = float(bar[1]) / int(bar[2])
    assert f"{int(bar[2]):,} bytes</text>" in page
    every = [box for side in boxes.values() for box in side]
    assert len({end - start for *_, start, end in every}) > 1
    for _, width, _, start, end in every:
        assert width == pytest.approx((end - start) * byte, abs=0.01)


def test_the_page_has_the_tables_that_are_printed(tmp_path):
    path = tmp_path / "plan.html"
    options = ("qwen3_next_80b", "--tp", "2:1", "--link", "400Gb", "--compare", "--html", path)
    printed = run(*options).stdout
    runs, compared = re.findall(r"<table>(.*?)</table>", path.read_text(), re.S)
    for table in (runs, compared):
        for row in re.findall(r"<tr>(.*?)</tr>", table):
            cells = re.findall(r"<t[dh]>(.*?)</t[dh]>", row)
            words = " ".join(filter(None, cells)).split()
            assert {word for word in words if word not in printed.split()} == set()
    assert runs.count("<tr>") == 1 + 4 + 1 and "<td>all</td>" in runs  # a head, roles, their sum
    for line in ("on the wire: at least", "That supposes", "makes runs"):
        assert line in printed and line in path.read_text()


def test_layers_that_do_not_travel_are_said_and_not_drawn(tmp_path):
    page, _ = drawn(tmp_path / "plan.html", "llama_3_1_70b", "--pp", "1:2")
    assert "<b>target k: layers 40-79</b>: nothing travels" in page
    assert "<b>target v: layers 0-39</b>: nothing travels" in page
    assert page.count('<div class="map"><svg') == 2 * 2 * 2  # k and v, of both sides, to two ranks


def test_bytes_that_several_ranks_send_have_a_colour_of_their_own(tmp_path):
    """Two ranks of prefill hold every second stretch of 16 tokens each."""
    for rank in range(2):
        layout = json.loads(write(tmp_path / "d.json", page_size=32).read_text())
        layout["spaces"][0]["interleave"] = {"size": 16, "ranks": 2, "rank": rank}
        (tmp_path / f"p{rank}.json").write_text(json.dumps(layout))
    files = [tmp_path / name for name in ("p0.json", "p1.json", "d.json")]
    page, boxes = drawn(tmp_path / "plan.html", *files)
    words = f"prefill {files[0]}, {files[1]}, each of other positions"
    colours = {words: colour for colour, words in legend_of(page).items()}
    assert {box[2] for box in boxes[f"decode {files[2]}"]} == {colours[words]}
    assert {box[2] for box in boxes[f"prefill {files[1]}"]} == {colours[f"prefill {files[1]}"]}


def test_no_two_of_many_sources_have_one_colour():
    assert len({shade(number) for number in range(100)}) == 100
