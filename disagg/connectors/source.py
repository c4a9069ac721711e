"""What a prefill engine tells a decode engine of a request, by way of a proxy or client."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from disagg.errors import RoomError
from disagg.protocol.messages import MAX_ROOM_NAME, Room, room_name
from disagg.protocol.trace_context import is_traceparent
from kvpool.layout.text import is_name

FIRST_TOKEN = "first_token"
"""The aux value that names the token after those whose state is handed over: decode computes it
first. One that prefill has sampled (SGLang), or the prompt's last (vLLM).
"""
REMOTE_DECODE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""The `kv_transfer_params` that vLLM's proxies send to prefill."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a request's state is: its room, and the endpoint addresses of prefill's ranks. Where
    they are known: `prompt`, the digest of the `tokens` tokens that are handed over.
    """

    room: Room
    addresses: tuple[str, ...]
    prompt: str | None = None
    tokens: int | None = None

    @classmethod
    def read(cls, told: Mapping[str, Any], ids: Sequence[int] | None = None) -> Source:
        """Of what a client has sent with a prompt of tokens `ids`. Raises ValueError."""
        room, addresses = told.get("remote_request_id"), told.get("remote_addresses") or ()
        if not room and ids is not None:
            room = named_room(told.get("room"), ids)
        required = {"remote_request_id": room, "remote_addresses": addresses}
        if missing := ", ".join(key for key, value in required.items() if not value):
            raise ValueError(f"kv_transfer_params have no {missing}. Did a kvpool prefill answer?")
        try:
            room = room_name(room)
        except RoomError as error:
            raise ValueError(f"kv_transfer_params: remote_request_id: {error}") from None
        is_list = isinstance(addresses, list | tuple)
        if not is_list or not all(isinstance(address, str) for address in addresses):
            raise ValueError("kv_transfer_params: remote_addresses is a list of texts.")
        tokens = told.get("remote_num_tokens")
        if tokens is not None and (type(tokens) is not int or tokens < 1):
            raise ValueError(f"kv_transfer_params: remote_num_tokens {tokens!r}: 1 or more.")
        return cls(room, tuple(addresses), told.get("remote_prompt"), tokens)

    def told(self) -> dict[str, Any]:
        """As `read` takes it, with names that vLLM's proxies pass on."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_request_id": self.room,
            "remote_addresses": list(self.addresses),
            "remote_num_tokens": self.tokens,
            "remote_prompt": self.prompt,
        }

    def check_prompt(self, ids: Sequence[int] | None) -> None:
        """Raises ValueError if prefill has computed another prompt than these tokens."""
        ours = None if ids is None else prompt_digest(ids[: self.tokens or -1])
        if None not in (self.prompt, ours) and self.prompt != ours:
            raise ValueError(
                f"prefill computed another prompt ({self.prompt!r}), this one is {ours!r}. Do both "
                "engines have the same tokenizer and chat template?"
            )


def traceparent_in(headers: Mapping[str, str] | None) -> str | None:
    """Of what an engine keeps of a request's headers. A client writes them: what is none is left
    out, and the request goes on.
    """
    traceparent = (headers or {}).get("traceparent")
    return traceparent if is_traceparent(traceparent) else None


def prompt_digest(ids: Sequence[int]) -> str:
    """Of token ids: 16 hex digits."""
    return hashlib.blake2b(array("q", ids).tobytes(), digest_size=8).hexdigest()


def named_room(name: Any, ids: Sequence[int] | None) -> Room | None:
    """The room of a prompt where a proxy has named it to both sides; None if it has not. Two
    prompts of one name have two rooms: neither side reads or offers the other's. A number is the
    room itself: SGLang's bootstrap_room, whose prompt its engines do not know. Raises RoomError.
    """
    if isinstance(name, int) and not isinstance(name, bool):
        return room_name(name)
    if ids is None or not isinstance(name, str) or not name:
        return None
    return room_name(f"{name}#{prompt_digest(ids[:-1])}")


def request_room(request: str, number: int) -> Room:
    """The room of a request that no proxy has named: `number` is another for each of this engine's.
    A client may choose a request's id, also one that is no name.
    """
    name = f"{request}#{number}"
    if is_name(name, MAX_ROOM_NAME):
        return name
    text = request.encode(errors="surrogatepass")
    return f"{hashlib.blake2b(text, digest_size=16).hexdigest()}#{number}"
