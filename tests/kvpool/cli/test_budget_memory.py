"""What `kvpool budget` takes for memory and weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kvpool.cli.test_budget import GIB, read, run


def test_weights_and_utilisation_leave_the_rest_for_state():
    """Of 80 GiB at 0.9 less 40 GiB, 32 GiB: pages of 64 tokens of 80 layers with 8 heads of 128."""
    asked = ["llama_3_1_70b", "--memory", "80GiB"]
    told = read(*asked, "--weights", "40GiB", "--utilisation", 0.9)
    assert (told["memory"], told["weights"]["bytes"]) == (80 * GIB, 40 * GIB)
    assert (told["stages"][0]["weights"], told["stages"][0]["state"]) == (40 * GIB, 32 * GIB)
    assert told["tokens"]["count"] == (32 * GIB // (64 * 80 * 2 * 8 * 128 * 2) - 1) * 64
    text = " ".join(run(*asked, "--weights", "40GiB", "--utilisation", 0.9).output.split())
    assert "weights: 40.0 GiB given for each rank" in text
    assert "0.9 of 80.0 GiB a rank, pages of 64 tokens" in text
    full = run(*asked, "--weights", "90GiB")
    assert full.exit_code == 1 and "does not fit: llama: 1.0 of 85,899,345,920" in full.stderr
    assert run(*asked, "--utilisation", 1.5).exit_code == 2


def test_weights_are_estimated_unless_they_are_given():
    """Llama 3.1 70B has 70.6 billion parameters of two bytes."""
    asked = ["llama_3_1_70b", "--tp", "2", "--pp", "2", "--json"]
    told = json.loads(run(*asked).output)
    assert told["weights"]["source"] == "estimated"
    assert told["weights"]["bytes"] == pytest.approx(141.1e9, rel=0.001)
    stages = [stage["weights"] for stage in told["stages"]]
    assert sum(stages) == pytest.approx(told["weights"]["bytes"] / 2)
    assert [stage["state"] + stage["weights"] for stage in told["stages"]] == [told["memory"]] * 2
    text = " ".join(run(*asked[:-1]).output.split())
    assert "weights: 131.4 GiB estimated from the config (bf16), an even part on each of 2" in text
    done = run("deepseek_v3")  # 627 GiB
    assert done.exit_code == 1 and "leave them out: --weights none" in done.stderr


def test_weights_that_cannot_be_estimated_are_said_not_to_be_counted(tmp_path):
    path = tmp_path / "config.json"
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64}
    path.write_text(json.dumps({**config, "num_attention_heads": 2}))
    text = " ".join(run(path).output.split())
    assert "weights are not counted: llama config: intermediate_size must be" in text
    assert "Give --weights" in text
    assert json.loads(run(path, "--json").output)["weights"]["source"] == "none"


def test_a_devices_memory_is_what_a_program_gets_of_it():
    """An H200 is sold with 141 GB: PyTorch's total in the reports is 143155 MB."""
    report = Path(__file__).parents[3] / "docs" / "reports" / "h200-2026-11-27" / "bench.json"
    assert "total_memory=143155MB" in report.read_text()
    for options in ([], ["--memory", "h200"]):
        assert read("llama_3_1_70b", *options)["memory"] == 143155 << 20
    done = run("llama_3_1_70b", "--memory", "H300")
    assert done.exit_code == 2 and "Or a device: H200 (139.8 GiB)" in " ".join(
        done.stderr.replace("│", " ").split()
    )
