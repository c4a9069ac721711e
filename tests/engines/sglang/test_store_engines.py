"""Real SGLang engines over one store: what one has written another reads. Tokens are those of a
single engine, bytes are equal by an oracle that reads SGLang's own tensors, and how many tokens
were not computed is SGLang's own count.
"""

from __future__ import annotations

import time

import pytest

pytest.importorskip("sglang")

from tests.engines.pair import EXACT, LENGTHS, compare
from tests.engines.vllm.engines import prompts

HITS = [(length - 1) // 256 * 256 for length in LENGTHS]
SIDES = {
    "pages of 16 to 1": ({"page_size": 16}, {"page_size": 1}),
    "pages of 1 to 16": ({"page_size": 1}, {"page_size": 16}),
}
ENGINE = {"disable_radix_cache": False, "radix_cache_backend": "kvpool"}


@pytest.fixture
def over(start, tmp_path):
    """Starts an engine over the store of a test."""

    def one(model="llama", extra=None, **arguments):
        settings = {"store": f"file://{tmp_path}/store", **(extra or {})}
        return start("single", model, extra=settings, **ENGINE, **arguments)

    return one


def written(folder, count, seconds=30):
    """Waits until the store has so many objects."""
    until = time.monotonic() + seconds
    while len(found := [*folder.glob("store/*/*/*.*.full")]) < count:
        assert time.monotonic() < until, found
        time.sleep(0.05)
    return found


@pytest.mark.parametrize("name", SIDES)
def test_another_engine_goes_on(name, over, expected, tmp_path):
    first, second = SIDES[name]
    asked, right = prompts(*LENGTHS), expected("llama", **EXACT)
    watched = {"environ": {"KVPOOL_WATCH_STORE": "prefill"}, "watch": tmp_path}
    writes = over(**first, **EXACT, **watched).ready()
    got = [writes.generate([prompt])[0] for prompt in asked]
    assert [one["tokens"] for one in got] == [one["tokens"] for one in right]
    assert [one["cached"] for one in got] == [0] * len(asked)
    written(tmp_path, 3)
    writes.idle(cached=True)
    writes.close()
    watched["environ"] = {"KVPOOL_WATCH_STORE": "decode"}
    reads = over(**second, **EXACT, **watched).ready()
    got = reads.generate(asked)
    assert [one["cached"] for one in got] == HITS
    assert [one["tokens"] for one in got] == [one["tokens"] for one in right]
    tensors, nbytes, wrong = compare(tmp_path)
    assert not wrong
    assert tensors and nbytes
    reads.idle(cached=True)
