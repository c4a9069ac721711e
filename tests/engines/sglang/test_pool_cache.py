"""SGLang prefills and `transformers` over kvpool's own pool decodes, and the other way round: the
tokens are those of one SGLang engine and of plain transformers (float32, greedy).
"""

from __future__ import annotations

import time

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint, create_engine
from disagg.connectors.source import FIRST_TOKEN
from kvpool.integrations.transformers import PoolCache
from tests.engines.pair import EXACT, LENGTHS
from tests.engines.sglang.engines import addresses, bootstrap
from tests.engines.transformer import STEPS
from tests.engines.vllm.engines import prompts

PATIENCE = 60.0


def test_transformers_decodes_what_sglang_has_prefilled(start, expected, transformer):
    side, asked, got = transformer("llama"), prompts(*LENGTHS), []
    prefill = start("prefill", "llama", **EXACT).ready()
    where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.port, "tokens": 1}
    with DecodeEndpoint(side.pool.layout, create_engine("local"), verify="checksum") as endpoint:
        link = endpoint.connect(addresses(prefill.port), timeout=PATIENCE)
        for prompt in asked:
            room, request = time.monotonic_ns(), side.allocator.new_request()
            side.allocator.extend(request, len(prompt), received=True)
            endpoint.receive(room, request.address(), link=link, aux=[FIRST_TOKEN])
            name = prefill.add(prompt, bootstrap_room=room, **where)
            assert endpoint.wait(room, PATIENCE) is KVPoll.Success, endpoint.failure(room)
            prefill.finished(name)
            first = endpoint.aux(room)[FIRST_TOKEN]
            cache = PoolCache(side.pool, side.allocator, [request])
            got.append([first, *side.greedy(cache, [first], STEPS - 1)])
    prefill.idle()
    assert got == [side.alone(prompt) for prompt in asked]
    assert got == [one["tokens"] for one in expected("llama", **EXACT)]


def test_sglang_decodes_what_transformers_has_prefilled(start, expected, transformer):
    side, asked = transformer("llama"), prompts(*LENGTHS)
    decode = start("decode", "llama", page_size=32, **EXACT).ready()
    with (
        PrefillEndpoint(side.pool.layout, create_engine("local")) as endpoint,
        bootstrap([endpoint.address]) as port,
    ):
        where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port}
        names, rooms = [], []
        for prompt in asked:
            rooms.append(time.monotonic_ns())
            names.append(decode.add(prompt, bootstrap_room=rooms[-1], tokens=STEPS, **where))
            cache = PoolCache.new(side.pool, side.allocator)
            first = int(side.logits(cache, prompt).argmax())
            endpoint.send(rooms[-1], cache.requests[0].address(), aux={FIRST_TOKEN: first})
        got = [decode.finished(name)["tokens"] for name in names]
        for room in rooms:
            assert endpoint.wait(room, PATIENCE) is KVPoll.Success, endpoint.failure(room)
    decode.idle()
    assert got == [side.alone(prompt) for prompt in asked]
    assert got == [one["tokens"] for one in expected("llama", **EXACT)]
