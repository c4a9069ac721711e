"""The demo: eight families and two engines; two processes compute the same as one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer import Exit
from typer.testing import CliRunner

from disagg.cli.demo import command as demo, sides
from disagg.cli.demo.models import MODELS, DemoSettings
from disagg.cli.demo.sides import PrefillSide, decoded_prompts
from disagg.engines.base import engine_names
from kvpool.cli import app
from kvpool.process import OtherProcess
from kvpool.testing.memory import ByteCount
from tests.disagg.engines.peers import ENGINES
from tests.outputs import output_of

KVPOOL = Path(sys.executable).with_name("kvpool")
# around pages, windows and compressed entries of 4 and 128 tokens
OVER_ALL = ("llama",)  # all models over all engines: --long
LENGTHS = (1, 3, 4, 5, 127, 128, 129, 257, 400)
PAGES = {"deepseek_v4": (256, 128)}


def settings(model, prompts, chunk, dtype, packing=None, **more):
    return DemoSettings(
        model=model,
        prompts=prompts,
        chunk_tokens=chunk,
        new_tokens=4,
        dtype=dtype,
        packing=packing or dtype,
        **more,
    )


def kvpool(*arguments):
    return subprocess.run(
        [KVPOOL, *map(str, arguments)], capture_output=True, text=True, timeout=240
    )


@pytest.fixture(scope="module")
def play():
    """Runs a demo between this process and another that plays prefill in all of them; returns the
    verdict and what was printed.
    """
    with OtherProcess(PrefillSide) as other:

        def run(settings):
            console = Console(file=StringIO(), width=200)
            prompts = [*decoded_prompts(other.revived(), settings, console)]
            good = all(check.passed for prompt in prompts for check in prompt.checks)
            return good, console.file.getvalue()

        yield run


@pytest.mark.parametrize(
    ("model", "engine"),
    [
        pytest.param(model, engine, marks=[pytest.mark.long] * (engine not in few))
        for model in MODELS
        for few in (ENGINES if model in OVER_ALL else ENGINES[:1],)
        for engine in ENGINES
    ],
)
def test_decode_elsewhere_equals_one_process(play, model, engine):
    # the longest prompt is as much work as all others, and nothing new to a second engine
    lengths = LENGTHS if engine == ENGINES[0] else LENGTHS[:-1]
    prefill_page, decode_page = PAGES.get(model, (16, 24))
    pages = {"prefill_page": prefill_page, "decode_page": decode_page}
    good, said = play(settings(model, lengths, 100, "bfloat16", engine=engine, **pages))
    assert good, said
    claim = "logits of 4 of 4 decoded steps bit-equal to one process"
    for other in ("same pool", "transformers' own cache"):
        assert said.count(f"PASS {claim}, {other}") == len(lengths)
    assert said.count("PASS") == 3 * len(lengths) and "FAIL" not in said


@pytest.mark.parametrize("model", MODELS)
def test_a_quantised_pool_moves_bit_for_bit_and_reports_its_error(play, model):
    good, said = play(settings(model, (130, 257), 100, "float32", packing="fp8"))
    assert good, said
    assert said.count("PASS logits of 4 of 4 decoded steps bit-equal") == 2
    errors = re.findall(r"PASS largest logit error of fp8: ([\d.]+)% of the largest", said)
    assert len(errors) == 2 and all(0 < float(error) < 10 for error in errors)


@pytest.mark.parametrize("model", OVER_ALL)
def test_the_npus_code_over_reference_operators_equals_one_process(play, model):
    good, said = play(settings(model, (70,), 50, "bfloat16", device="npu-reference"))
    assert good, said
    assert said.count("PASS logits of 4 of 4 decoded steps bit-equal") == 2


def test_the_command_runs_both_processes_and_prints_the_verdict(tmp_path):
    drawing = tmp_path / "rooms.html"
    done = kvpool(
        "demo", "--engine", ENGINES[-1], "--prompt-tokens", 5, "--prompt-tokens", 130,
        "--new-tokens", 4, "--chunk-tokens", 100, "--packing", "fp8",
        "--prefill-page", 16, "--decode-page", 24, "--dtype", "bfloat16", "--timeline", drawing,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASS") == 6 and "FAIL" not in done.stdout
    text = drawing.read_text()
    for words in ("<h2>5 tokens: ", "<h2>130 tokens: ", "tokens 100-129", "prefill releases"):
        assert words in text


def test_json_is_one_object_and_the_tables_are_on_standard_error():
    done = kvpool(
        "demo", "--json", "--prompt-tokens", 5, "--prompt-tokens", 40, "--new-tokens", 2,
        "--prefill-page", 8, "--decode-page", 8,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = output_of("demo", done.stdout)
    assert (found["model"], found["passed"], found["failure"]) == ("llama", True, None)
    whole = 8 * 2 * 4 * 32 * 4  # bytes of a token: layers, k and v, heads of 32 float32
    assert [each["tokens"] for each in found["prompts"]] == [5, 40]
    assert [each["bytes"] for each in found["prompts"]] == [5 * whole, 40 * whole]
    for each in found["prompts"]:
        assert len(each["checks"]) == 3 and all(check["passed"] for check in each["checks"])
        assert all(f"PASS {check['found']}\n" in done.stderr for check in each["checks"])


def test_json_says_which_comparison_failed(monkeypatch, capsys):
    """Of 8 bytes 7 are equal, whatever the pools hold."""
    monkeypatch.setattr(sides, "same_as_pool", lambda *pools: ByteCount(1, 8))
    with pytest.raises(Exit) as ended:
        demo.demo(prompt_tokens=[40], new_tokens=2, prefill_page=8, decode_page=8, as_json=True)
    found = output_of("demo", capsys.readouterr().out)
    assert ended.value.exit_code == 1 and not found["passed"] and found["failure"] is None
    (prompt,) = found["prompts"]
    failed = [each["found"] for each in prompt["checks"] if not each["passed"]]
    assert failed == ["7 of 8 live bytes of the pool equal"]


def test_json_has_the_reason_of_a_failure(capsys):
    with pytest.raises(Exit):
        demo.demo(device="gpu", as_json=True)
    found = output_of("demo", capsys.readouterr().out)
    assert not found["passed"] and found["prompts"] == []
    assert found["failure"].startswith("device 'gpu': no installed package offers 'gpu'")


class Misleading(PrefillSide):
    """Computes one token more than decode has room for."""

    def open(self, settings):
        return super().open(replace(settings, prompts=(settings.prompts[0] + 1,)))


class Vanishing:
    """Ends before it has an endpoint."""

    def open(self, settings):
        os._exit(3)


class NotSending(PrefillSide):
    """Completes the handshake, and ends a little later."""

    def send(self, number):
        time.sleep(0.5)
        os._exit(5)


@pytest.mark.parametrize(
    ("instead", "sentence"),
    [
        (Misleading, "41 tokens, decode made room for 40"),
        (Vanishing, "prefill ended with status 3"),
        (NotSending, "prefill ended with status 5"),
    ],
)
def test_a_failed_hand_off_is_exit_status_1_with_the_reason(monkeypatch, capsys, instead, sentence):
    monkeypatch.setattr(sides, "PrefillSide", instead)
    with pytest.raises(Exit) as ended:
        demo.demo(prompt_tokens=[40], prefill_page=8, decode_page=8)
    assert ended.value.exit_code == 1
    said = capsys.readouterr().out
    assert "FAIL" in said and sentence in said


def test_a_reason_with_brackets_is_printed_unchanged(monkeypatch, capsys):
    monkeypatch.setattr(demo, "engine_class", lambda _: type("E", (), {"availability": missing}))
    with pytest.raises(Exit):
        demo.demo()
    assert "not there. Install kvpool[nixl]." in capsys.readouterr().out


def missing():
    return "not there. Install kvpool[nixl]."


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--dtype", "int8", "one of float32, bfloat16, float16."),
        ("--packing", "int4", "one of float32, fp8, mxfp8."),
        ("--engine", "pigeon", f"one of {', '.join(engine_names())}."),
        ("--model", "gpt", f"one of {', '.join(MODELS)}."),
    ],
)
def test_invalid_options_are_refused_with_a_sentence(option, value, sentence):
    done = CliRunner().invoke(app, ["demo", option, value])
    assert done.exit_code == 2
    told = " ".join(done.output.replace("│", "").split())
    assert f"{option} {value}: {sentence}" in told
