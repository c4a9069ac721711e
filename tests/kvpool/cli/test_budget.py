"""`kvpool budget`: figures against hand arithmetic and against pools of the sizes that they say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import kvpool.models
from kvpool.cli.budget import budget
from kvpool.device.cpu import CPUDevice
from kvpool.layout.formats import Shard
from kvpool.models import declare, declare_draft, shipped
from kvpool.models.sizing import DoesNotFit, figures, parse_memory, split
from tests.outputs import output_of

GIB = 1 << 30
KVPOOL = Path(sys.executable).with_name("kvpool")
every_shipped = pytest.mark.parametrize("name", shipped())
app = typer.Typer()
app.command()(budget)


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def read(*arguments):
    """Without weights, unless they are given."""
    weights = [] if "--weights" in arguments else ["--weights", "none"]
    done = run(*arguments, *weights, "--json")
    assert done.exit_code == 0, done.output
    return output_of("budget", done.output)


def of(name, memory=GIB, **more):
    return figures(declare(name), memory, **{"packing": "fp8", **more})


def by_role(found, per):
    return {(s.owner, s.role): s.nbytes for s in found.shares if s.per == per}


# hand arithmetic


def test_deepseek_v32_in_fp8_takes_656_and_132_bytes_a_layer_and_token():
    found = of("deepseek_v32", 141 * GIB, tp=8, pp=2)
    assert [stage.layers for stage in found.stages] == [tuple(range(31)), tuple(range(31, 61))]
    for layers, stage in zip((31, 30), found.stages):
        assert stage.bytes_per("token") == layers * (656 + 132)
        pages = 141 * GIB // (64 * layers * (656 + 132))
        assert (stage.items, stage.tokens) == ({"num_pages": pages}, (pages - 1) * 64)
        assert stage.requests == (pages - 1) // (8192 // 64)
    assert (found.tightest_for_tokens, found.tightest_for_requests) == (0, 0)


def test_roles_have_the_bytes_computed_by_hand():
    assert by_role(of("deepseek_v32"), "token") == {
        ("target", "latent"): 61 * 512,
        ("target", "latent.scale"): 61 * 4 * 4,
        ("target", "rope"): 61 * 64 * 2,
        ("target", "index_key"): 61 * 128,
        ("target", "index_key.scale"): 61 * 4,
    }


def test_padding_of_deepseek_v4_is_a_role_of_its_own():
    token = by_role(of("deepseek_v4"), "token")
    # a row is 583 bytes and one that is spare; pages are whole rows of 576
    spare = 21 * (37440 - 64 * 583) / 256 + 20 * (1728 - 2 * 583) / 256
    assert token["target", "padding"] == spare
    assert token["target", "c4.latent"] == 21 * 448 / 4
    assert token["target", "c128.latent"] == 20 * 448 / 128
    assert sum(token.values()) == 21 * (37440 / 256 + 132 / 4) + 20 * 1728 / 256


def test_a_request_keeps_windows_slots_and_rings():
    assert by_role(of("gpt_oss_120b", dtype="bf16", packing=None), "request") == {
        ("target", "swa.k"): 18 * 3 * 64 * 8 * 64 * 2,  # 128 tokens lie in up to 3 pages of 64
        ("target", "swa.v"): 18 * 3 * 64 * 8 * 64 * 2,
    }
    kimi = by_role(of("kimi_linear_48b", tp=4), "request")
    assert kimi["target", "temporal"] == 20 * 8 * 128 * 128 * 4
    assert kimi["target", "conv.q"] == 20 * 3 * 8 * 128 * 2
    rings = by_role(of("deepseek_v4", draft=declare_draft("deepseek_v4")), "request")
    assert rings["target", "c4.state"] == 21 * 16 * 4 * 512 * 4  # 16 and 256 with speculation
    assert rings["target", "c128.state"] == 20 * 256 * 2 * 512 * 4
    assert by_role(of("deepseek_v4"), "request")["target", "c128.state"] == 20 * 128 * 4096


def test_shards_share_heads_and_repeat_latents():
    assert of("llama_3_1_70b", tp=8).stages[0].bytes_per("token") == 80 * 2 * (128 + 4)
    assert of("llama_3_1_70b", tp=16).stages[0].bytes_per("token") == 80 * 2 * (128 + 4)
    assert of("deepseek_v3", tp=8).stages[0].bytes_per("token") == 61 * 656


def test_stages_are_even_and_earlier_ones_larger():
    assert [len(part) for part in split(range(61), 4)] == [16, 15, 15, 15]
    assert split(range(4), 4) == [(0,), (1,), (2,), (3,)]
    assert sum(split(range(7), 3), ()) == tuple(range(7))
    with pytest.raises(ValueError, match="62 stages for 61 layers"):
        split(range(61), 62)


# pools of the sizes that figures say


@every_shipped
def test_items_are_those_of_a_pool_from_the_same_budget(name):
    for stage in of(name, 3 * GIB, tp=2, pp=3, requests=7).stages:
        common = {"packing": "fp8", "device": "meta", "shard": Shard(0, 2)}
        pool = declare(name).from_budget(3 * GIB, layers=stage.layers, requests=7, **common)
        assert {n: getattr(pool, n) for n in stage.items} == stage.items
        assert (pool.nbytes, pool.bytes_per_token) == (stage.nbytes, stage.bytes_per("token"))


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32", "deepseek_v4"])
def test_a_target_and_its_draft_fill_the_memory_together(name):
    draft = declare_draft(name)
    found = of(name, GIB, pp=2, draft=draft)
    stage = found.stages[1]
    assert [s.draft_layers for s in found.stages] == [(), draft.layers]
    common = {"packing": "fp8", "device": "meta"}
    more = {"speculation": True} if name == "deepseek_v4" else {}

    def together(**changes):
        items = {**stage.items, **changes}
        target = declare(name).build(layers=stage.layers, **common, **more, **items)
        return target.nbytes + draft.build(**common, **items).nbytes

    assert together() == stage.nbytes <= GIB
    assert together(num_pages=stage.items["num_pages"] + 1) > GIB


@every_shipped
def test_one_more_request_does_not_fit(name):
    stage = of(name, 64 * GIB, tokens=5000).stages[0]
    declared = declare(name)
    pages = -(-5000 // declared.page_size)
    per_window = {"gpt_oss_120b": 3, "deepseek_v4": 2}.get(name, 0)

    def nbytes(requests):
        items = {"num_pages": 1 + requests * pages, "num_slots": 1 + requests}
        items["num_window_pages"] = 1 + requests * per_window
        return declared.build(packing="fp8", device="meta", **items).nbytes

    assert nbytes(stage.requests) <= 64 * GIB < nbytes(stage.requests + 1)


@every_shipped
def test_bytes_by_role_sum_to_the_items_of_the_pool(name):
    found = of(name, draft=declare_draft(name), pp=3)
    for per in ("token", "request"):
        parts = sum(stage.bytes_per(per) for stage in found.stages)
        assert sum(by_role(found, per).values()) == pytest.approx(parts)
    pool = declare(name).build(
        packing="fp8", num_pages=2, num_window_pages=2, num_slots=2, device="meta"
    )
    assert of(name).stages[0].bytes_per("token") == pytest.approx(pool.bytes_per_token)


@every_shipped
def test_a_block_pool_is_that_of_the_same_budget_and_counts_blocks_whole(name):
    found = of(name, 8 * GIB, placement="block", page_size=512, requests=3).stages[0]
    common = {"packing": "fp8", "device": "meta", "placement": "block", "page_size": 512}
    pool = declare(name).from_budget(8 * GIB, requests=3, **common)
    assert found.items == {"num_pages": pool.num_pages} and found.nbytes == pool.nbytes
    block = pool.layout.buffers[0].item_stride
    pages, states = (
        [s for s in pool.layout.spaces if s.ids is None and s.grows is grows]
        for grows in (True, False)
    )
    assert found.bytes_per("token") == pytest.approx(block * len(pages) / 512)
    each = sum(2 if space.window else 1 for space in states)  # a window may lie in two pages
    assert found.bytes_per("request") == pytest.approx(block * each)
    assert found.tokens == (pool.num_pages - 1 - 3 * each) // len(pages) * 512
    assert found.requests == (pool.num_pages - 1) // (len(pages) * 16 + each)


def test_a_stage_without_growing_layers_holds_any_number_of_tokens():
    found = of("kimi_linear_48b", pp=9)
    assert [n for n, stage in enumerate(found.stages) if stage.tokens is None] == [0, 4]
    assert found.stages[0].requests > found.stages[1].requests > 0
    config = {"model_type": "mistral", "num_hidden_layers": 2, "num_key_value_heads": 1}
    config |= {"head_dim": 8, "sliding_window": 64}
    windows = figures(declare(config), 1 << 20, dtype="bf16")
    assert (windows.tightest_for_tokens, windows.stages[0].tokens) == (None, None)
    assert windows.stages[0].requests == ((1 << 20) // (4 * 64 * 8 * 2) - 1) // 2  # 2 pages each


def test_no_pool_takes_memory(monkeypatch):
    monkeypatch.setattr(CPUDevice, "allocate", None)
    assert read("deepseek_v4", "--pp", 2, "--draft", "--memory", "4TiB")["tokens"]["count"] > 10**9


def test_memory_that_holds_no_page_is_refused_with_what_would():
    page = 61 * 64 * 656
    with pytest.raises(DoesNotFit, match=f"layers 0-60.*1 request; {2 * page:,} bytes are enough"):
        of("deepseek_v3", 2 * page - 1)
    assert of("deepseek_v3", 2 * page).stages[0].tokens == 64


# the command


def test_memory_is_read_in_either_kind_of_unit():
    sizes = {"141GiB": 141 << 30, "80GB": 80 * 10**9, " 1.5 tib ": 3 << 39, "1048576": 1 << 20}
    sizes |= {"80b": 80, "1kB": 1000, "2b": 2, "80Gi": 80 << 30, "80G": 80 * 10**9}
    assert {text: parse_memory(text) for text in sizes} == sizes


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "1Gib5", "-1GB", "1e9", "0", "0.4", "1 2", "nan", "1,5GB", "9" * 5000, "٣GB"],
)
def test_memory_that_is_ambiguous_is_refused(text):
    with pytest.raises(ValueError, match="such as 141GiB"):
        parse_memory(text)


@pytest.mark.parametrize("text", ["80", "4096", "80.5", "1048575"])
def test_a_small_number_without_a_unit_is_refused(text):
    words = f"memory '{text}': a number alone is bytes, of 1,048,576"
    with pytest.raises(ValueError, match=words):
        parse_memory(text)
    for option in ("--memory", "--weights"):
        done = run("llama_3_1_70b", option, text)
        assert done.exit_code == 2 and f"{option[2:]} '{text}'" in done.stderr


def test_json_has_the_documented_keys_and_the_figures():
    told = read("deepseek_v32", "--memory", "141GiB", "--tp", 8, "--pp", 2, "--dtype", "fp8")
    keys = "model dtype memory weights utilisation tp pp page_size block_pool tokens"
    assert {*told} == {*f"{keys} reserved_requests context_tokens shares stages requests".split()}
    assert told["weights"] == {"source": "none", "words": "", "bytes": 0}
    assert {stage["state"] for stage in told["stages"]} == {141 * GIB}
    stage = "layers draft_layers weights state bytes_per_token bytes_per_request num_pages "
    stage += "num_window_pages"
    assert [*told["stages"][0]] == [*stage.split(), "num_slots", "bytes", "tokens", "requests"]
    assert [*told["shares"][0]] == ["owner", "role", "per", "layers", "bytes"]
    assert sum(share["bytes"] for share in told["shares"]) == 61 * 788
    assert told["tokens"] == {"stage": 0, "count": told["stages"][0]["tokens"]}
    assert (told["memory"], told["page_size"], told["dtype"]) == (141 * GIB, 64, "fp8")
    assert told["stages"][1]["layers"] == [*range(31, 61)]


def test_dtypes_of_linear_states_are_options():
    """48 layers, 3 of 4 linear: 32 heads of 128 x 128, convolutions of 8192 channels by 3 taps."""
    asked = ["qwen3_next_80b", "--temporal-dtype", "bf16", "--conv-dtype", "fp32"]
    told = read(*asked)["stages"][0]["bytes_per_request"]
    assert told == 36 * (32 * 128 * 128 * 2 + 8192 * 3 * 4)
    assert read(asked[0])["stages"][0]["bytes_per_request"] == 36 * (32 * 128 * 128 * 4 + 8192 * 6)
    for wrong in (("llama_3_1_70b", *asked[1:3]), (*asked[:2], "fp8")):
        assert run(*wrong).exit_code == 2


def test_options_reach_the_figures():
    assert read("gpt_oss_120b", "--block-pool")["block_pool"] is True
    assert "Block 0 is reserved" in run("gpt_oss_120b", "--block-pool").output
    told = read("deepseek_v4", "--dtype", "bf16", "--page-size", 512, "--draft", "--requests", 3)
    assert (told["page_size"], told["reserved_requests"]) == (512, 3)
    assert told["stages"][0]["draft_layers"] == [43]
    assert told["stages"][0]["num_slots"] == 3 + 1
    short, long = (read("llama_3_1_70b", "--tokens", n)["requests"]["count"] for n in (64, 6400))
    assert short > 99 * long > 0


def test_the_installed_command_prints_tables_of_roles_and_stages():
    options = ["--memory", "141GiB", "--tp", "8", "--pp", "2", "--dtype", "fp8"]
    options += ["--weights", "none"]
    call = [KVPOOL, "budget", "deepseek_v32", *options]
    done = subprocess.run(call, capture_output=True, text=True, timeout=120, check=True)
    for told in ("target latent.scale", "48,068", "24,428", "6,197,632", "Tightest: stage 0."):
        assert told in done.stdout, done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["gpt2"], 2, "or a shipped config"),
        (["llama_3_1_70b", "--tp", "3"], 2, "8 heads cannot be split over 3"),
        (["llama_3_1_70b", "--pp", "81"], 2, "81 stages for 80 layers"),
        (["llama_3_1_70b", "--memory", "141Q"], 2, "such as 141GiB"),
        (["llama_3_1_70b", "--dtype", "int4"], 2, "one of bf16"),
        (["llama_3_1_70b", "--draft"], 2, "no draft layers"),
        (["deepseek_v3", "--dtype", "mxfp8"], 2, "MLA takes fp8"),
        (["deepseek_v4", "--page-size", "64"], 2, "not a multiple of 128"),
        (
            ["llama_3_1_70b", "--memory", "1MB", "--weights", "none"],
            1,
            "are too few for a page of 64 tokens",
        ),
        (["llama_3_1_70b", "--tp", "0"], 2, "--tp"),
    ],
)
def test_what_cannot_be_is_refused_with_a_reason_and_a_status(arguments, code, told):
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (code, "")
    assert told in " ".join(done.stderr.replace("│", " ").split())


def test_a_draft_with_compressed_layers_speculates_as_its_target_does():
    configs = Path(kvpool.models.__file__).with_name("configs")
    config = json.loads((configs / "deepseek_v4.json").read_text())
    config["compress_ratios"] = [*config["compress_ratios"][:43], 4]
    target, draft = declare(config), declare_draft(config)
    found = figures(target, 80 << 30, draft=draft, packing="fp8")
    assert found.stages[0].draft_layers == (43,)
