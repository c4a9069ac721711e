"""One client's request: both sides are asked, and decode's answer is what it gets."""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field

import msgspec
from aiohttp import ClientError, ClientResponse, ClientSession

from disagg.cli.proxy import asks
from disagg.cli.proxy.asks import Body, NotHandedOver
from disagg.cli.proxy.servers import BootstrapServers, NoAnswer, Upstream


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer, and what of its body was read so far."""

    response: ClientResponse
    start: bytes

    @property
    def failed(self) -> bool:
        return self.response.status >= 400


@dataclass(eq=False, kw_only=True)
class Exchange:
    """A request on its way. `at_once`: vLLM's decode is asked together with its prefill. `seconds`
    of each step, until decode's first byte.
    """

    session: ClientSession
    bootstraps: BootstrapServers
    path: str
    body: Body
    headers: Mapping[str, str]
    prefill: Upstream
    decode: Upstream
    at_once: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    _tasks: list[asyncio.Future[Answer]] = field(default_factory=list)
    _responses: list[ClientResponse] = field(default_factory=list)

    async def answer(self) -> Answer:
        """Decode's, or the error of either side. Raises NoAnswer and NotHandedOver."""
        of_sglang = await self.prefill.identify(self.session)
        for_sglang = await self.decode.identify(self.session)
        if of_sglang != for_sglang:
            asks.check_between_engines(self.path, self.body, samples=for_sglang)
            answer = await (self._sglang_to_vllm() if of_sglang else self._vllm_to_sglang())
        else:
            answer = await (self._sglang() if of_sglang else self._vllm())
        if answer.failed:
            self.prefill.addresses = ()  # a prefill that was started again has others
        return answer

    def complete(self) -> None:
        """Decode's answer is passed on. Prefill's own is not ended, which may be a little later."""
        for task in self._tasks:
            _ending.add(task)
            task.add_done_callback(_ended)
        self._tasks, self._responses = [], []

    def close(self) -> None:
        """Ends what is still asked for: a server aborts a request whose connection is closed."""
        for task in self._tasks:
            task.cancel()
            task.add_done_callback(_ended)
        for response in self._responses:
            response.close()

    async def _vllm(self) -> Answer:
        addresses = self.prefill.addresses
        if self.at_once and addresses:
            room = uuid.uuid4().hex
            prefill = self._vllm_prefill(asks.vllm_prefill(self.body, room=room))
            return await self._both(prefill, asks.vllm_decode_of_room(self.body, room, addresses))
        first = await self._vllm_prefill(asks.vllm_prefill(self.body))
        if first.failed:
            return first
        params = asks.parsed(first.start).get("kv_transfer_params")
        return await self._decode(self.body | ({"kv_transfer_params": params} if params else {}))

    async def _vllm_prefill(self, body: Body) -> Answer:
        first = await self._ask("prefill", self.prefill, self.path, body)
        params = asks.parsed(first.start).get("kv_transfer_params") or {}
        self.prefill.addresses = tuple(params.get("remote_addresses") or ())
        return first

    async def _sglang(self) -> Answer:
        place = asks.bootstrap(self.prefill.host, self.prefill.bootstrap_port, new_room())
        asked = asks.sglang_prefill(self.body, place)
        prefill = self._ask("prefill", self.prefill, self.path, asked)
        return await self._both(prefill, self.body | place)

    async def _vllm_to_sglang(self) -> Answer:
        room = new_room()
        first = await self._vllm_prefill(asks.vllm_prefill_of_all(self.body, room))
        if first.failed:
            return first
        ids = asks.prompt_tokens(asks.parsed(first.start))
        if not ids or not self.prefill.addresses:
            raise NotHandedOver(f"{self.prefill.url} did not answer as KvpoolConnector's prefill.")
        addresses = self.prefill.addresses
        host, port = await asyncio.to_thread(self.bootstraps.place, self.decode, addresses)
        place = asks.bootstrap(host, port, room)
        return await self._decode(asks.sglang_decode_of_vllm(self.path, self.body, ids, place))

    async def _sglang_to_vllm(self) -> Answer:
        ids = self.body.get("prompt") or []
        if not asks.is_tokens(ids):
            asked = asks.tokens_asked(self.path, self.body)
            rendered = await self._ask("tokenize", self.decode, "/tokenize", asked)
            if rendered.failed:
                return rendered
            ids = asks.parsed(rendered.start).get("tokens") or []
        if len(ids) < 2:
            return await self._decode(self.body)
        room, ranks = new_room(), await self.prefill.sglang_ranks(self.session)
        place = asks.bootstrap(self.prefill.host, self.prefill.bootstrap_port, room)
        asked = asks.sglang_prefill_of_tokens(ids, place)
        prefill = self._ask("prefill", self.prefill, "/generate", asked)
        return await self._both(prefill, asks.vllm_decode_of_sglang(self.body, room, ids, ranks))

    async def _both(self, prefill: Awaitable[Answer], body: Body) -> Answer:
        """Decode's answer once its first bytes are there, or prefill's error if that is sooner."""
        first, second = asyncio.ensure_future(prefill), asyncio.ensure_future(self._decode(body))
        self._tasks += [first, second]
        await asyncio.wait((first, second), return_when=asyncio.FIRST_COMPLETED)
        if not second.done() and first.result().failed:
            return first.result()
        return await second

    async def _decode(self, body: Body) -> Answer:
        return await self._ask("decode", self.decode, self.path, body)

    async def _ask(self, step: str, server: Upstream, path: str, body: Body) -> Answer:
        """Of decode the first bytes, so that an error is still one; of others the whole answer."""
        began = time.perf_counter()
        try:
            response = await self.session.post(
                server.url + path, data=msgspec.json.encode(body), headers=self.headers
            )
            self._responses.append(response)
            whole = step != "decode" or response.status >= 400
            start = await (response.read() if whole else response.content.readany())
        except (ClientError, OSError) as error:
            reason = error or type(error).__name__
            raise NoAnswer(f"{server.role} {server.url}: {reason}") from None
        self.seconds[step] = time.perf_counter() - began
        return Answer(response, start)


def new_room() -> int:
    """As SGLang's router makes them: any number of 63 bits."""
    return secrets.randbits(63)


_ending: set[asyncio.Future[Answer]] = set()
"""The event loop itself keeps no reference to a task."""


def _ended(task: asyncio.Future[Answer]) -> None:
    _ending.discard(task)
    if not task.cancelled():
        task.exception()  # else the event loop logs it as never retrieved
