"""Speculation across the pair: tokens, every draft and how many of them are accepted are those of
a single engine, step by step. Drafts depend on all of a drafter's state.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.engines.pair import EXACT, LENGTHS, compare
from tests.engines.vllm.drafts import save_head
from tests.engines.vllm.engines import prefilled, prompts
from tests.engines.vllm.models import save
from tests.engines.vllm.test_pairs import TP

BFLOAT16: dict[str, Any] = {}
TOKENS = 24


class Draft(NamedTuple):
    """Of `model`, and what drafts for it; `knows`: many of its tokens are right."""

    model: str
    method: str
    tokens: int = 3
    knows: bool = True
    both: dict[str, Any] = EXACT

    def config(self, models: Path) -> dict[str, Any]:
        """vLLM's `speculative_config`."""
        made = {"method": self.method, "num_speculative_tokens": self.tokens}
        target = save(self.model, models)
        if self.method == "draft_model":
            made["model"] = str(target)
        elif self.method != "mtp":
            shallow = save("llama_shallow", models)
            made["model"] = str(save_head(self.method, shallow, models / self.method))
        return made


DRAFTS = {
    "draft model": Draft("llama", "draft_model"),
    "eagle": Draft("llama_shallow", "eagle"),
    "eagle3": Draft("llama_shallow", "eagle3"),
    "mtp": Draft("deepseek_mtp", "mtp", 1),
    "eagle3 of windows": Draft("gpt_oss", "eagle3", 2, knows=False),
    "mtp of a hybrid": Draft("qwen3_next_mtp", "mtp", 1, both=BFLOAT16),
}


@pytest.fixture
def single(start: Callable[..., Any], models: Path) -> Callable[..., Any]:
    """What one engine does: tokens, and each step's drafts with how many were accepted."""

    def ask(draft: Draft, **more: Any) -> tuple[list[Any], list[Any]]:
        config = draft.config(models)
        given = {"speculative_config": config, **draft.both, **more}
        engine = start("single", draft.model, **given).ready()
        ended = [engine.generate([one])[0] for one in prompts(*LENGTHS)]
        return [one["tokens"][0] for one in ended], [one["drafts"] for one in ended]

    return ask


def pair(start: Any, draft: Draft, models: Path, **sides: dict[str, Any]) -> tuple[Any, Any]:
    """Both engines, each with its drafter unless `sides` say otherwise."""
    given = {"speculative_config": draft.config(models), **draft.both}
    begin = partial(start, model=draft.model)
    made = [begin(role, **{**given, **sides.get(role, {})}) for role in ("prefill", "decode")]
    return made[0].ready(), made[1].ready()


def decoded(prefill: Any, decode: Any) -> tuple[list[Any], list[Any]]:
    """As `single`."""
    asked = prompts(*LENGTHS)
    # one after the other: where prompts share a chunk, vLLM's drafters have other state
    params = [prefilled(prefill, [one])[0] for one in asked]
    ended = [decode.generate([one], params=[each])[0] for one, each in zip(asked, params)]
    return [one["tokens"][0] for one in ended], [one["drafts"] for one in ended]


def accepted(drafts: list[Any]) -> float:
    """Of 1 draft, how many were accepted."""
    steps = [step for request in drafts for step in request]
    return sum(right for _, right in steps) / sum(len(tokens) for tokens, _ in steps)


@pytest.mark.parametrize(("there", "here"), [(TP, {}), ({}, TP)])
def test_a_drafts_heads_are_shared_by_ranks_too(there, here, start, single, models, tmp_path):
    draft, watch = DRAFTS["eagle3"], {"watch": tmp_path}
    prefill, decode = pair(
        start, draft, models, prefill={**watch, **there}, decode={**watch, **here}
    )
    assert decoded(prefill, decode) == single(draft)
    _, nbytes, wrong = compare(tmp_path)
    assert nbytes and not wrong


@pytest.mark.parametrize("name", DRAFTS)
def test_drafts_are_those_of_one_engine(name, start, single, models, tmp_path):
    draft, watch = DRAFTS[name], {"watch": tmp_path}
    tokens, drafts = single(draft)
    prefill, decode = pair(start, draft, models, prefill=watch, decode=watch)
    got = decoded(prefill, decode)
    _, nbytes, wrong = compare(tmp_path)
    assert nbytes and not wrong
    assert got[0] == tokens
    assert got[1] == drafts
    assert not draft.knows or accepted(drafts) > 0.2
    prefill.idle(), decode.idle()


@pytest.mark.parametrize(
    ("name", "stream"),
    [("eagle", "chunks"), ("draft model", "layers"), ("mtp of a hybrid", "layers")],
)
def test_drafts_are_those_of_one_engine_where_prompts_are_streamed(
    name, stream, start, single, models, tmp_path
):
    """Computed in chunks of at most 120 tokens; decode's `layers` wait for no draft."""
    draft = DRAFTS[name]
    tokens, drafts = single(draft, max_num_batched_tokens=120)
    told = {"watch": tmp_path, "extra": {"stream": stream}}
    prefill, decode = pair(
        start, draft, models, prefill={**told, "max_num_batched_tokens": 120}, decode=told
    )
    assert decoded(prefill, decode) == (tokens, drafts)
    _, nbytes, wrong = compare(tmp_path)
    assert nbytes and not wrong


@pytest.mark.parametrize("name", ["draft model", "eagle"])
def test_a_draft_on_decode_only_is_refused_or_begins_from_nothing(name, start, single, models):
    """The control too: with a drafter's state that is not that of the prompt fewer are accepted."""
    draft = DRAFTS[name]
    tokens, drafts = single(draft)
    none = {"speculative_config": None}
    prefill, decode = pair(start, draft, models, prefill=none)
    asked = prompts(40)
    assert decode.generate(asked, params=prefilled(prefill, asked))[0]["reason"] == ["error"]
    assert "allow_missing={'draft'}" in decode.tail(100_000)
    decode.close()
    _, decode = pair(start, draft, models, decode={"extra": {"allow_missing": ["draft"]}})
    got = decoded(prefill, decode)
    assert got[0] == tokens
    assert accepted(got[1]) < 0.8 * accepted(drafts)
    assert "a prefill has no draft k, draft v" in decode.tail(100_000)
    prefill.idle(), decode.idle()


def test_a_draft_on_prefill_only_is_not_sent(start, single, models):
    draft = DRAFTS["eagle"]
    prefill, decode = pair(start, draft, models, decode={"speculative_config": None})
    assert decoded(prefill, decode) == (single(draft)[0], [[]] * len(LENGTHS))
    prefill.idle(), decode.idle()


def test_another_draft_is_refused_by_name_on_both_sides(start, models):
    """Of the same sizes: nothing but its weights tells."""
    draft = DRAFTS["eagle"]
    other = save_head("eagle", save("llama_shallow", models), models / "other", noise=0.01)
    config = {"method": "eagle", "num_speculative_tokens": 3, "model": str(other)}
    prefill, decode = pair(start, draft, models, decode={"speculative_config": config})
    asked = prompts(40)
    assert decode.generate(asked, params=prefilled(prefill, asked))[0]["reason"] == ["error"]
    for side in (prefill, decode):
        side.idle()
        assert "draft.weights: " in side.tail(100_000)
