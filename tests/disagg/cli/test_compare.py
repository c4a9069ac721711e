"""`kvpool explain --compare`: runs counted byte by byte, rates, and what cannot be compared."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise, product
from statistics import median_low

import pytest
from typer.testing import CliRunner

from disagg.cli.sides import parse_run_rate
from kvpool.cli import app
from tests.outputs import output_of

LAYERS, HEADS, DIM, TOKENS = 2, 4, 8, 512
CELL = DIM * 2  # bytes of a head of a token
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": DIM,
    "hidden_size": HEADS * DIM,
}
DEFAULTS = {"order": "nhd", "page-size": "64", "placement": "layer"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path.parent


def run(*arguments):
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["explain", *map(str, arguments)])


def report(*arguments, status=0):
    done = run(*arguments, "--json")
    assert done.exit_code == status, done.output
    return output_of("explain", done.stdout)


# an oracle: the place of every head of every token, and what continues on both sides


def place(settings, heads, role, layer, token, head):
    """A stretch of memory, no two of which are adjacent, and the byte in it."""
    size = int(settings["page-size"])
    page, entry = divmod(token, size)
    number = head - heads.start
    step = entry * len(heads) + number if settings["order"] == "nhd" else number * size + entry
    item = size * len(heads) * CELL
    if settings["placement"] in ("layer", "stack"):
        return (page, role, layer), step * CELL
    return (page,), (role * LAYERS + layer) * item + step * CELL


def busiest(tp, sides):
    """Bytes of every run of the rank with the most runs, and the most bytes of a rank."""
    received, sent = Counter(), Counter()
    shards = [
        [range(n * HEADS // ranks, (n + 1) * HEADS // ranks) for n in range(ranks)] for ranks in tp
    ]
    for decode, wanted in enumerate(shards[1]):
        cells = []
        for role, layer, token, head in product(range(2), range(LAYERS), range(TOKENS), wanted):
            source = next(n for n, heads in enumerate(shards[0]) if head in heads)
            where = (role, layer, token, head)
            src = place(sides[0], shards[0][source], *where)
            cells.append((place(sides[1], wanted, *where), source, src))
        cells.sort()
        length = CELL
        for (dst, source, src), after in pairwise([*cells, None]):
            ends = [(dst[0], dst[1] + CELL), source, (src[0], src[1] + CELL)]
            if after is not None and ends == [*after]:
                length += CELL
                continue
            received[decode, length] += 1
            sent[source, length] += 1
            length = CELL
    ranks = [
        [n for (rank, n), count in side.items() if rank == number for _ in range(count)]
        for side, count in ((received, tp[1]), (sent, tp[0]))
        for number in range(count)
    ]
    return max(ranks, key=len), max(map(sum, ranks))


def settings_of(base, option):
    """Those of both sides, with an option as it is written."""
    sides = [dict(side) for side in base]
    if option != "as asked":
        name, _, text = option.removeprefix("--").partition("=")
        first, colon, second = text.partition(":")
        sides[0][name], sides[1][name] = first, second if colon else first
    return sides


@pytest.mark.parametrize(
    ("tp", "asked"),
    [
        ("4:2", {}),
        ("1:1", {"page-size": "64:16"}),
        ("2:1", {"order": "hnd:hnd", "page-size": "16:64"}),
        ("1:1", {"order": "hnd:nhd", "placement": "page:page"}),
        ("1:2", {"order": "hnd:hnd", "placement": "page:layer"}),
    ],
)
def test_runs_of_every_alternative_are_those_of_the_bytes(model, tp, asked):
    base = [dict(DEFAULTS), dict(DEFAULTS)]
    for name, text in asked.items():
        base[0][name], base[1][name] = text.split(":")
    options = [word for name, text in asked.items() for word in (f"--{name}", text)]
    rows = report(model, "--tp", tp, "--tokens", TOKENS, "--compare", *options)["compared"]
    by_option = {option: row for row in rows for option in row["options"]}
    for option, row in by_option.items():
        ranks = [*map(int, tp.split(":"))]
        runs, nbytes = busiest(ranks, settings_of(base, option))
        figures = [len(runs), nbytes, sum(runs) / len(runs), median_low(runs)]
        names = ("runs", "bytes", "bytes_per_run", "median")
        assert [row[name] for name in names] == figures, (option, row)
    assert "as asked" in by_option and len(by_option) > 15
    assert [row["runs"] for row in rows] == sorted(row["runs"] for row in rows)
    assert len({(row["runs"], row["median"]) for row in rows}) == len(rows)


def test_the_sentence_names_what_makes_runs_long(model):
    """Heads of a token lie on two ranks of prefill: the tokens of a head do not."""
    said = run(model, "--tp", "4:2", "--tokens", TOKENS, "--compare").stdout
    assert "--order=hnd, nhd:hnd makes runs 64 times as long." in said
    said = run(model, "--tokens", TOKENS, "--compare", "--placement", "page", "--page-size", 512)
    assert "None of these makes runs longer." in said.stdout


def test_what_an_alternative_says_is_what_it_gives_when_it_is_asked(model):
    rows = report(model, "--tp", "4:2", "--tokens", TOKENS, "--compare")["compared"]
    option = next(option for option in rows[0]["options"] if ":" in option)
    again = report(model, "--tp", "4:2", "--tokens", TOKENS, option)
    assert again["plans"][0]["runs"] == rows[0]["runs"]
    assert again["plans"][0]["bytes"] == rows[0]["bytes"]
    assert report(model)["compared"] is None


# rates


def test_the_time_says_how_many_runs_a_second_it_supposes(model):
    """Each of decode's ranks gets two heads, in runs of a head of a token."""
    options = (model, "--tp", "4:2", "--tokens", TOKENS, "--link", "1MB", "--run-rate", "2k")
    runs, nbytes = 2 * LAYERS * TOKENS * 2, 2 * LAYERS * TOKENS * 2 * CELL
    told = report(*options)
    assert told["seconds"] == pytest.approx(nbytes / 1e6)
    assert told["supposed_runs_per_second"] == pytest.approx(runs / told["seconds"])
    assert (told["runs_per_second"], told["run_seconds"]) == (2000, runs / 2000)
    said = " ".join(run(*options).stdout.split())
    assert f"at least {1e3 * nbytes / 1e6:.4g} ms" in said
    assert f"supposes 62,500 runs a second on a link: {runs:,} runs of {CELL} bytes" in said
    assert f"At 2,000 runs a second {runs:,} runs take {1e3 * runs / 2000:,.0f} ms" in said
    bare = report(model)
    names = ("seconds", "supposed_runs_per_second", "runs_per_second", "run_seconds")
    assert [bare[name] for name in names] == [None] * 4


def test_the_best_alternative_is_the_soonest(model):
    options = ("--tp", "4:2", "--tokens", TOKENS, "--link", "1MB", "--run-rate", "20k")
    rows = report(model, *options, "--compare")["compared"]
    times = [max(row["seconds"], row["run_seconds"]) for row in rows]
    assert times == sorted(times) and times[0] < times[-1]
    for row in rows:
        assert row["seconds"] == pytest.approx(row["bytes"] / 1e6)
        assert row["run_seconds"] == pytest.approx(row["runs"] / 2e4)


@pytest.mark.parametrize(("text", "rate"), [("5M", 5e6), ("200k", 2e5), ("1500000", 1.5e6)])
def test_a_rate_of_runs_is_a_number_a_second(text, rate):
    assert parse_run_rate(text) == rate


# what cannot be compared


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["MODEL", "--run-rate", "fast"], "--run-rate 'fast': runs a second such as 5M"),
        (["MODEL", "--run-rate", "0"], "--run-rate '0': runs a second"),
        (["MODEL", "--order", "nhd:dhn"], "--order 'dhn': one of nhd, hnd, or PREFILL:DECODE such"),
        (["MODEL", "--placement", "row"], "--placement 'row': one of layer, page, stack, block"),
        (["deepseek_v3", "--order", "hnd"], "deepseek_v3: it has no K and V to order."),
        (["FILE", "FILE", "--compare"], "--compare: the sides are layout files"),
        (["MODEL", "FILE", "--order", "hnd"], "cannot change a layout file. Leave decode's out"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_a_sentence(model, tmp_path, arguments, reason):
    file = tmp_path / "layout.json"
    file.write_text(CliRunner().invoke(app, ["describe", str(model), "--json"]).stdout)
    words = {"MODEL": model, "FILE": file}
    done = run(*(words.get(word, word) for word in arguments))
    assert done.exit_code == 2 and reason in " ".join(done.output.split())


def test_a_side_of_files_stays_as_it_is(model, tmp_path):
    file = tmp_path / "layout.json"
    file.write_text(CliRunner().invoke(app, ["describe", str(model), "--json"]).stdout)
    rows = report(file, model, "--compare")["compared"]
    options = {option for row in rows for option in row["options"]} - {"as asked"}
    assert options and all("=:" in option for option in options)


def test_what_is_refused_is_listed_with_the_reason():
    """Pages of DeepSeek-V4 hold whole blocks of 128 tokens, and its states no heads."""
    rows = report("deepseek_v4", "--compare")["compared"]
    reasons = {option: row["refused"] for row in rows for option in row["options"]}
    assert "not a multiple of 128" in reasons["--page-size=64"]
    assert "no K and V to order" in reasons["--order=hnd"]
    assert reasons["as asked"] is None and reasons["--placement=page"] is None
    said = run("deepseek_v4", "--compare").stdout
    assert "refused: --order=hnd, hnd:nhd, nhd:hnd: deepseek_v4: it has no K and V" in said


def test_what_no_order_page_size_or_placement_mends_is_said_once(model):
    refused = report(model, "--packing", "bf16:fp8", "--compare", status=1)
    (row,) = refused["compared"]
    assert row["options"][0] == "as asked" and len(row["options"]) > 15
    assert row["refused"] == refused["refused"][0]["reason"]
    assert row["runs"] is None and refused["seconds"] is None
