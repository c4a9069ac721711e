"""examples/batcher.py: each answer is that of the model alone, over transformers' own cache."""

from __future__ import annotations

import importlib.util
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")
EXAMPLE = Path(__file__).parent.parent / "examples" / "batcher.py"
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
FOUR = {"num_hidden_layers": 4}
LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
MORE = {
    "llama": FOUR,
    "gemma3_text": {"sliding_window": 24, "head_dim": 16, "num_key_value_heads": 2},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        **FOUR,
        **LATENT,
        **EXPERTS,
    },
    "qwen3_next": {"num_experts": 4, "head_dim": 32, "num_key_value_heads": 2, **FOUR, **EXPERTS},
}


@pytest.fixture
def example(monkeypatch):
    """The program as a module that a second process can import too."""
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    spec = importlib.util.spec_from_file_location("batcher", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "batcher", module)
    spec.loader.exec_module(module)
    return module


@torch.no_grad()
def alone(model, tokens, answer):
    """`tokens` without their last `answer`, and what the model answers, one request at a time."""
    cache = transformers.DynamicCache(config=model.config)
    found, new = tokens[:-answer], tokens[:-answer]
    for _ in range(answer):
        logits = model(torch.tensor([new]), past_key_values=cache).logits
        new = [int(logits[0, -1].argmax())]
        found = found + new
    return found


def assert_all_free(usage):
    assert usage.requests == 0
    assert not any(usage.used.values())


def test_every_answer_of_two_processes_is_that_of_the_model_alone(example, capsys):
    here, there = example.main(["--requests", "5", "--pages", "16"])
    model = example.Batcher(Namespace(model="llama", pages=16)).model
    answers = here[0] | there[0]
    assert sorted(answers) == list(range(5))
    for tokens in answers.values():
        assert tokens == alone(model, tokens, example.ANSWER)
    assert sorted(there[0]) == [0, 3]
    for _, _, usage in (here, there):
        assert usage.prefix.found_tokens > 0
        assert_all_free(usage)
    assert "3 done" in capsys.readouterr().out


@pytest.mark.parametrize("name", MORE)
def test_a_batcher_of_any_family_preempts_reuses_and_resumes(example, name, monkeypatch):
    sizes = example.SIZES | MORE[name] | {"hidden_size": 64, "intermediate_size": 96}
    monkeypatch.setattr(example, "SIZES", sizes)
    batcher = example.Batcher(Namespace(model=name, pages=13))
    generator = torch.Generator().manual_seed(5)
    system, *tails = (
        torch.randint(512, (n,), generator=generator).tolist() for n in (48, 16, 16, 16)
    )
    for number, tail in enumerate(tails):
        prompt = system + tail
        batcher.waiting.append(example.Job(number, prompt, len(prompt) + 40))
    while batcher.waiting or batcher.running:
        batcher.step()
        batcher.allocator.check_integrity()
    assert sorted(batcher.done) == list(range(len(tails)))
    for tokens in batcher.done.values():
        assert tokens == alone(batcher.model, tokens, 40)
    usage = batcher.allocator.usage()
    assert batcher.preempted > 0
    assert usage.prefix.found_tokens > 0
    assert_all_free(usage)


def test_its_help_names_every_option(example, capsys):
    with pytest.raises(SystemExit):
        example.main(["--help"])
    said = capsys.readouterr().out
    assert all(f"--{name}" in said for name in ("model", "requests", "pages"))


def test_it_is_as_short_as_it_claims():
    assert len(EXAMPLE.read_text().splitlines()) <= 150
