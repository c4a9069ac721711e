"""examples/batcher.py: each answer is that of the model alone, over transformers' own cache."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")
EXAMPLES = Path(__file__).parents[2] / "examples"
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
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("batcher")


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


@pytest.mark.parametrize("name", MORE)
def test_a_batcher_of_any_family_preempts_and_computes_no_token_twice(example, name, monkeypatch):
    sizes = example.SIZES | MORE[name] | {"hidden_size": 64, "intermediate_size": 96}
    monkeypatch.setattr(example, "SIZES", sizes)
    batcher = example.Batcher(name, 13)
    forward, computed = batcher.forward, Counter()

    def counting(jobs):
        before = [job.request.num_tokens for job in jobs]
        forward(jobs)
        for job, start in zip(jobs, before):
            computed.update((job, n) for n in range(start, job.request.num_tokens))

    monkeypatch.setattr(batcher, "forward", counting)
    generator = torch.Generator().manual_seed(5)
    system, *tails = (
        torch.randint(512, (n,), generator=generator).tolist() for n in (48, 16, 16, 16)
    )
    for tail in tails:
        batcher.waiting.append(example.Job(system + tail, 64 + 40))
    while batcher.waiting or batcher.running:
        batcher.step()
        batcher.allocator.check_integrity()
    answers = sorted(batcher.done)
    assert [tokens[:64] for tokens in answers] == sorted(system + tail for tail in tails)
    for tokens in answers:
        assert tokens == alone(batcher.model, tokens, 40)
    assert set(computed.values()) == {1}
    usage = batcher.allocator.usage()
    assert usage.prefix.lookups > len(tails)  # some began again
    assert usage.prefix.found_tokens > 0
    assert usage.requests == 0
    assert not any(usage.used.values())


def test_it_serves_its_requests(example, capsys):
    example.main()
    assert "8 done, each as by the model alone, " in (said := capsys.readouterr().out)
    assert "hits=10" in said
