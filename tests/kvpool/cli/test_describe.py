"""`kvpool describe`: files and configs in, tables, JSON and pictures out."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest
import typer
from typer.testing import CliRunner

from kvpool import NSAPool, Shard
from kvpool.cli.describe import describe
from kvpool.layout import Interleave, PoolLayout
from kvpool.layout.text import steps
from kvpool.models import declare, declare_draft

APP = typer.Typer(rich_markup_mode=None)  # as kvpool.cli
APP.command()(describe)
COMMON = {"layers": range(3), "num_pages": 9, "page_size": 64, "device": "meta"}
TINY = '{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, \
"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}'


def run(*arguments, fails=False):
    done = CliRunner(env={"COLUMNS": "200"}).invoke(APP, [str(a) for a in arguments])
    assert done.exit_code == (2 if fails else 0), done.output
    assert not fails or isinstance(done.exception, SystemExit)
    return done


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "layout.json"
    path.write_text(nsa().to_json())
    return path


def nsa():
    return NSAPool(packing="fp8", **COMMON).layout


# what is read


def test_a_layout_file_is_printed_region_by_region(file):
    said = run(file).stdout
    for words in ("layout.json", "target latent.scale", "0-2", "from 8,192", "entry 64 x 656"):
        assert words in said
    assert "space kv: pages of 64 entries" in said


def test_which_positions_a_rank_holds_is_printed(tmp_path):
    layout, part = nsa(), Interleave(16, 1, 4)
    spaces = tuple(replace(space, interleave=part) for space in layout.spaces)
    path = tmp_path / "layout.json"
    path.write_text(replace(layout, spaces=spaces).to_json())
    said = " ".join(run(path).stdout.split())
    assert "space kv: pages of 64 entries, rank 1 of 4 in stretches of 16 tokens" in said


def test_json_and_msgpack_say_the_same_and_json_out_is_what_went_in(file, tmp_path):
    packed = file.with_name("layout")
    packed.write_bytes(nsa().to_msgpack())
    assert run(packed).stdout.splitlines()[1:] == run(file).stdout.splitlines()[1:]
    said = run(file, "--json", "--svg", tmp_path / "a.svg").stdout
    assert PoolLayout.from_json(said) == nsa()


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ([], {"dtype": "bf16", "page_size": 64, "num_pages": 1024}),
        (["--dtype", "fp32"], {"dtype": "f32", "page_size": 64, "num_pages": 1024}),
        (["--dtype", "float32"], {"dtype": "fp32", "page_size": 64, "num_pages": 1024}),
        (
            ["--packing", "fp8", "--page-size", 16, "--tp", 4, "--rank", 3, "--items", 7],
            {"packing": "fp8", "page_size": 16, "num_pages": 7, "shard": Shard(3, 4)},
        ),
    ],
)
def test_a_config_gives_the_layout_of_its_pool(options, given):
    expected = declare("qwen3_235b").build(device="meta", **given).layout
    assert PoolLayout.from_json(run("qwen3_235b", *options, "--json").stdout) == expected


def test_a_config_file_a_directory_and_an_absent_head_dim_are_read_by_the_models(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(TINY)
    (one, other) = (run(what, "--json").stdout for what in (path, tmp_path))
    assert one == other
    assert PoolLayout.from_json(one).model == "llama"


def test_every_space_of_a_model_has_items():
    layout = PoolLayout.from_json(run("deepseek_v4", "--packing", "fp8", "--json").stdout)
    assert {buffer.items for buffer in layout.buffers} == {1024}
    assert {"kv", "swa", "ring"} <= set(layout.space_by_name)
    assert "2, 4, ..., 42" in run("deepseek_v4").stdout


def test_a_draft_is_described_beside_its_target():
    said = run("deepseek_v32", "--packing", "fp8", "--draft", "--json").stdout
    common = {"num_pages": 1024, "packing": "fp8", "device": "meta"}
    parts = [d("deepseek_v32").build(**common).layout for d in (declare, declare_draft)]
    assert PoolLayout.from_json(said) == PoolLayout.merge(*parts)


# what is written


def test_pictures_are_written_where_they_are_asked_for(file, tmp_path):
    svg, html = tmp_path / "a.svg", tmp_path / "a.html"
    done = run(file, "--svg", svg, "--html", html)
    assert "target index_key" in done.stdout
    assert done.stderr == f"wrote {svg}\nwrote {html}\n"
    assert ElementTree.parse(svg).getroot().get("width") == "1150"
    page = html.read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "index_key.scale, entry 63: bytes 8,444 to 8,447" in page


def test_names_in_brackets_are_printed_as_they_are(tmp_path):
    path = tmp_path / "layout"
    path.write_text(nsa().to_json().replace('"kv"', '"[red]kv"').replace("target", "[b]target"))
    said = run(path).stdout
    assert "[b]target latent" in said
    assert "space [red]kv: pages" in said


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1, 2, 5], "0-2, 5"),
        ([2, 4, 6], "2, 4, 6"),
        ([2, 4, 6, 8], "2, 4, ..., 8"),
        ([8, 2, 6, 4], "2, 4, ..., 8"),
        ([2, 4, 6, 9], "2, 4, 6, 9"),
        ([0, 1, 4, 5, 8, 9, 12, 13], "0-1, 4-5, ..., 12-13"),
        ([0, 1, 4, 5, 8, 9, 12], "0-1, 4-5, 8-9, 12"),
    ],
)
def test_layers_that_go_on_as_they_begin_are_cut_short(numbers, says):
    assert steps(numbers) == says


# what is refused


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["a\0b"], "embedded null byte. Give the path"),
        (["deepseek_v3", "--tp", "4", "--rank", "4"], "shard: rank 4 of 4"),
        (["deepseek_v3", "--rank", "1"], "shard: rank 1 of 1"),
        (["deepseek_v3", "--dtype", "bf17"], "dtype 'bf17': one of bf16"),
        (["llama_3_1_70b", "--draft"], "has no draft layers"),
    ],
)
def test_what_cannot_be_described_is_refused_with_a_sentence(arguments, says):
    said = " ".join(run(*arguments, fails=True).stderr.split())
    assert " ".join(says.split()) in said


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "neither JSON nor a msgpack layout"),
        (b"[1]", "neither JSON nor a msgpack layout"),
        (b"\xff\xfe", "malformed layout"),
        (b'{"buffers": [], "version": 9}', "layout version 9"),
        (b'{"regions": 1}', "malformed layout"),
        (b"{" * 100_000, "neither JSON nor a msgpack layout"),
        (b'{"model_type": "nothing"}', "model_type 'nothing' is not known."),
    ],
)
def test_a_file_that_is_neither_layout_nor_config_is_refused(tmp_path, content, says):
    path = tmp_path / "f"
    path.write_bytes(content)
    assert says in " ".join(run(path, fails=True).stderr.split())


def test_options_of_models_do_not_change_a_layout_file(file):
    said = " ".join(run(file, "--tp", 2, "--dtype", "bf16", fails=True).stderr.split())
    assert "--dtype, --tp cannot change a layout file. Leave them out" in said
