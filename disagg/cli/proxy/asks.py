"""What each server is asked for where a client asks for `body`, by the engines of both sides.

vLLM's prefill answers `kv_transfer_params`, which its decode is given (`toy_proxy_server.py` of
vLLM at commit 030ea52 is the model). SGLang's servers are both told a room, and where prefill's
bootstrap server is. docs/cross-engine.md has what one engine needs of the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from disagg.connectors.source import REMOTE_DECODE, Source, prompt_digest

Body = dict[str, Any]
CHAT = "/v1/chat/completions"
ONLY_DECODE = ("stream_options", "min_tokens", "min_completion_tokens")
RENDERED = (
    "model",
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
)
"""Of a chat, what decides its tokens."""


class NotHandedOver(Exception):
    """A request that cannot be handed over between these engines; the message says why."""


def vllm_prefill(body: Body, **params: Any) -> Body:
    """One token, of one sequence: prefill would hold each of `n` prompts until its lease ends."""
    asked = {key: value for key, value in body.items() if key not in ONLY_DECODE}
    asked |= {"kv_transfer_params": REMOTE_DECODE | params, "stream": False, "max_tokens": 1}
    return asked | {key: 1 for key in ("max_completion_tokens", "n") if key in body}


def vllm_prefill_of_all(body: Body, room: int) -> Body:
    """For SGLang: the state of the whole prompt, and the token that vLLM samples after it."""
    asked = vllm_prefill(body, room=room, whole=True) | {"return_token_ids": True}
    return asked | ({"min_tokens": 1} if body.get("min_tokens") else {})


def vllm_decode_of_room(body: Body, room: str, addresses: Sequence[str]) -> Body:
    """Asked before prefill has answered, by a room's name that prefill was told too."""
    params = {"do_remote_prefill": True, "room": room, "remote_addresses": [*addresses]}
    return body | {"kv_transfer_params": params}


def vllm_decode_of_sglang(body: Body, room: int, ids: Sequence[int], ranks: Sequence[str]) -> Body:
    """With the digest of what SGLang is given: vLLM refuses a prompt with other tokens."""
    stop = len(ids) - 1
    source = Source(room, tuple(ranks), prompt_digest(ids[:stop]), stop)
    return body | {"kv_transfer_params": source.told()}


def tokens_asked(path: str, body: Body) -> Body:
    """What vLLM's `/tokenize` is asked for."""
    names = RENDERED if path == CHAT else ("model", "prompt", "add_special_tokens")
    return {key: body[key] for key in names if key in body}


def bootstrap(host: str, port: int, room: int) -> Body:
    return {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room}


def sglang_prefill(body: Body, place: Body) -> Body:
    """Its answer is not passed on, so it is not streamed."""
    asked = {key: value for key, value in body.items() if key != "stream_options"}
    return asked | place | {"stream": False}


def sglang_prefill_of_tokens(ids: Sequence[int], place: Body) -> Body:
    """For a vLLM decode, which computes the prompt's last token itself (`POST /generate`)."""
    sampling = {"max_new_tokens": 1, "temperature": 0}
    return {"input_ids": [*ids[:-1]], "sampling_params": sampling, **place}


def sglang_decode_of_vllm(path: str, body: Body, ids: Sequence[int], place: Body) -> Body:
    """With the tokens that vLLM has computed, in place of what SGLang's tokenizer would make."""
    return body | place | ({"input_ids": [*ids]} if path == CHAT else {"prompt": [*ids]})


def prompt_tokens(answer: Mapping[str, Any]) -> list[int]:
    """Of an answer of vLLM's that was asked to `return_token_ids`."""
    choices = answer.get("choices") or [{}]
    return list(answer.get("prompt_token_ids") or choices[0].get("prompt_token_ids") or ())


def parsed(answer: bytes) -> Body:
    """An answer's object; empty if it is none."""
    try:
        decoded = msgspec.json.decode(answer)
    except msgspec.DecodeError:
        return {}
    return decoded if isinstance(decoded, dict) else {}


def check_between_engines(path: str, body: Body, *, samples: bool) -> None:
    """Raises NotHandedOver for what two engines do not treat alike. `samples`: prefill samples the
    answer's first token.
    """
    prompt = body.get("prompt")
    if path != CHAT and isinstance(prompt, list) and not is_tokens(prompt):
        raise NotHandedOver("one prompt a request: a text, or a list of token ids.")
    contents = [
        message.get("content")
        for message in body.get("messages") or ()
        if isinstance(message, dict)
    ]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    if any(not isinstance(part, dict) or part.get("type") != "text" for part in parts):
        raise NotHandedOver("text only: the engines prepare pictures and sound each in their way.")
    if samples and (body.get("n") or 1) != 1:
        raise NotHandedOver("n = 1: vLLM samples the first token of one sequence.")
    if samples and body.get("logprobs"):
        raise NotHandedOver("no logprobs: vLLM samples the first token, and does not tell them.")


def is_tokens(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(n) is int for n in prompt)
