"""Requests that vLLM and SGLang share: how each is asked.

vLLM hands over the state of a prompt without its last token, which decode computes. SGLang hands
over all of what it was given, and the token that comes next. So SGLang is given the prompt without
its last token, on either side: as prefill it then hands over what vLLM asks for; as decode it takes
the prompt's last token, which vLLM tells, for the first that prefill has sampled.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from tests.engines.process import EngineFailed
from tests.engines.sglang import engines as sglang
from tests.engines.vllm import engines as vllm

Prompt = list[int]


def vllm_engine(role: vllm.Role, model: Path, logs: Path, **arguments: Any) -> vllm.Engine:
    """vLLM's, in its own environment."""
    return vllm.Engine(role, model, logs, python=os.environ["KVPOOL_VLLM_PYTHON"], **arguments)


def rooms(count: int) -> list[int]:
    """Numbers that no other request has."""
    return [time.monotonic_ns() + number for number in range(count)]


def from_vllm(
    prefill: vllm.Engine,
    decode: sglang.Engine,
    prompts: list[Prompt],
    tokens: int = 24,
    cut: int = 1,
) -> list[list[int]]:
    """Tokens of prompts that vLLM prefills and SGLang decodes, which are cut by `cut` tokens."""
    named = rooms(len(prompts))
    params = [dict(vllm.PREFILL, room=room) for room in named]
    answers = prefill.generate(prompts, tokens=1, params=params)
    with sglang.bootstrap(answers[0]["params"]["remote_addresses"]) as port:
        where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "tokens": tokens + 1}
        asked = [
            decode.add(prompt[: len(prompt) - cut], bootstrap_room=room, **where)
            for prompt, room in zip(prompts, named)
        ]
        found = [decode.finished(name) for name in asked]
    for prompt, one in zip(prompts, found):
        if one["tokens"][:1] != prompt[-1:]:
            raise EngineFailed(f"{one}\n{decode.tail()}")
    return [one["tokens"][1:] for one in found]


def from_sglang(
    prefill: sglang.Engine, decode: vllm.Engine, prompts: list[Prompt], tokens: int = 24
) -> list[list[int]]:
    """Tokens of prompts that SGLang prefills and vLLM decodes, both asked at once."""
    return [answer["tokens"][0] for _, answer in both_answers(prefill, decode, prompts, tokens)]


def both_answers(
    prefill: sglang.Engine, decode: vllm.Engine, prompts: list[Prompt], tokens: int = 24
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What SGLang, which prefills, and vLLM, which decodes, answer to each prompt."""
    named = rooms(len(prompts))
    where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.port, "tokens": 1}
    first = [
        prefill.add(prompt[:-1], bootstrap_room=room, **where)
        for prompt, room in zip(prompts, named)
    ]
    known = {"do_remote_prefill": True, "remote_addresses": sglang.addresses(prefill.port)}
    last = [
        decode.add(prompt, tokens=tokens, params={**known, "remote_request_id": room})
        for prompt, room in zip(prompts, named)
    ]
    answers = [decode.finished(name) for name in last]
    pairs = [(prefill.finished(name), answer) for name, answer in zip(first, answers)]
    for _, answer in pairs:
        if not answer["tokens"][0]:
            raise EngineFailed(f"{answer}\n{prefill.tail()}\n{decode.tail()}")
    return pairs
