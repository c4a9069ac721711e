"""Real SGLang engines over one store: what one has written another reads. Tokens are those of a
single engine, bytes are equal by an oracle that reads SGLang's own tensors, and how many tokens
were not computed is SGLang's own count.
"""

from __future__ import annotations

import time

import pytest

pytest.importorskip("sglang")

from tests.engines.chunks import until_stored, whole_chunks
from tests.engines.pair import EXACT, LENGTHS, compare
from tests.engines.pool_side import PoolSide
from tests.engines.sglang.engines import handed_over
from tests.engines.vllm.engines import prompts
from tests.engines.vllm.models import save

HITS = [whole_chunks(length) for length in LENGTHS]
TP = {"tp_size": 2}
SIDES = {
    "pages of 16 to 1": ({"page_size": 16}, {"page_size": 1}),
    "pages of 1 to 16": ({"page_size": 1}, {"page_size": 16}),
    "chunks": ({"page_size": 16, "chunked_prefill_size": 128}, {"chunked_prefill_size": 128}),
    "2 ranks to 1": ({"page_size": 16, **TP}, {"page_size": 1}),
    "1 rank to 2": ({"page_size": 1}, {"page_size": 16, **TP}),
    "gemma3": ({"page_size": 16}, {"page_size": 1}),
}
ENGINE = {"disable_radix_cache": False, "radix_cache_backend": "kvpool"}
CHECKS = {
    "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "2",
}
"""SGLang's own: that ranks do the same, and that each slot has one owner."""


@pytest.fixture
def over(start, tmp_path):
    """Starts an engine over the store of a test."""

    def one(model="llama", extra=None, environ=None, **arguments):
        settings = {"store": f"file://{tmp_path}/store", **(extra or {})}
        more = {"extra": settings, "environ": {**CHECKS, **(environ or {})}}
        return start("single", model, **more, **{**ENGINE, **arguments})

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
    (first, second), model = SIDES[name], "gemma3" if name == "gemma3" else "llama"
    asked, right = prompts(*LENGTHS), expected(model, **EXACT)
    watched = {"environ": {"KVPOOL_WATCH_STORE": "1"}, "watch": tmp_path}
    writes = over(model, **first, **EXACT, **watched).ready()
    got = [writes.generate([prompt])[0] for prompt in asked]
    assert [one["tokens"] for one in got] == [one["tokens"] for one in right]
    assert [one["cached"] for one in got] == [0] * len(asked)
    written(tmp_path, 3 * first.get("tp_size", 1))
    writes.idle(cached=True)
    writes.close()
    reads = over(model, **second, **EXACT, **watched).ready()
    got = reads.generate(asked)
    assert [one["cached"] for one in got] == HITS
    assert [one["tokens"] for one in got] == [one["tokens"] for one in right]
    tensors, nbytes, wrong = compare(tmp_path)
    assert not wrong
    assert tensors and nbytes
    reads.idle(cached=True)


def test_a_second_turn_reads_what_the_first_has_generated(over, start, tmp_path):
    (prompt,) = prompts(500)
    writes = over(page_size=16, **EXACT).ready()
    turn = [*prompt, *writes.generate([prompt])[0]["tokens"], 5, 6, 7]
    written(tmp_path, 2)
    writes.close()
    with start("single", "llama", **EXACT).ready() as alone:
        right = alone.generate([turn])[0]["tokens"]
    got = over(**EXACT).ready().generate([turn])[0]
    assert got["cached"] == 512
    assert got["tokens"] == right


def test_tenants_are_kept_apart_by_engines(over, expected, tmp_path):
    asked, right = prompts(*LENGTHS)[:1], expected("llama", **EXACT)[0]["tokens"]
    writes = over(**EXACT).ready()
    writes.generate(asked, cache_salt="a")
    written(tmp_path, 1)
    writes.close()
    reads = over(**EXACT).ready()
    for salt, cached in ((None, 0), ("b", 0), ("a", HITS[0])):
        (got,) = reads.generate(asked, cache_salt=salt)
        assert (got["cached"], got["tokens"]) == (cached, right)


def test_transformers_reads_what_sglang_has_written(over, expected, transformers_side, tmp_path):
    asked = prompts(*LENGTHS)
    writes = over(page_size=16, **EXACT).ready()
    right = [one["tokens"] for one in writes.generate(asked)]
    written(tmp_path, 3)
    got = transformers_side.ask(asked)
    assert [one.cached for one in got] == HITS
    assert [one.tokens for one in got] == right
    assert right == [one["tokens"] for one in expected("llama", **EXACT)]


def test_sglang_reads_what_transformers_has_written(over, expected, transformers_side, tmp_path):
    asked = prompts(*LENGTHS)
    transformers_side.ask(asked)
    until_stored(f"file://{tmp_path}/store", asked)
    got = over(page_size=16, **EXACT).ready().generate(asked)
    assert [one["cached"] for one in got] == HITS
    right = expected("llama", **EXACT)
    assert [one["tokens"] for one in got] == [one["tokens"] for one in right]


@pytest.fixture
def transformers_side(models, tmp_path, one_thread):
    """`PoolCache` over the store of a test."""
    with PoolSide(save("llama", models), f"file://{tmp_path}/store", tmp_path) as side:
        yield side


def test_a_store_that_hangs_holds_up_what_it_was_asked_for_only(over, expected, tmp_path):
    asked, right = prompts(*LENGTHS), [one["tokens"] for one in expected("llama", **EXACT)]
    later = prompts(300, 600, seed=4)
    writes = over(page_size=16, **EXACT).ready()
    writes.generate([*asked, *later])
    written(tmp_path, 6)
    writes.close()
    hang = tmp_path / "hang"
    environ = {"KVPOOL_HANG": str(hang)}
    engine = over(extra={"store_timeout": 4.0}, environ=environ, page_size=16, **EXACT).ready()
    hang.touch()
    began = time.monotonic()
    names = [engine.add(prompt) for prompt in asked]
    for number in (1, 2):  # too short to be looked up
        assert engine.finished(names[number])["tokens"] == right[number]
    assert time.monotonic() - began < 4.0
    for number in (0, 3):
        got = engine.finished(names[number])
        assert (got["tokens"], got["cached"]) == (right[number], 0)
    assert time.monotonic() - began > 4.0
    hang.unlink()
    time.sleep(2.5)  # after a silence it is left alone for a while
    assert [one["cached"] for one in engine.generate(later)] == [256, 512]
    engine.idle(cached=True)


def test_a_writer_that_is_killed_leaves_nothing_wrong(over, expected, tmp_path):
    asked, right = prompts(*LENGTHS), [one["tokens"] for one in expected("llama", **EXACT)]
    for delay in (0.1, 0.3, 0.6):
        writes = over(page_size=16, **EXACT).ready()
        for prompt in asked:
            writes.add(prompt)
        time.sleep(delay)
        writes.kill()
    reads = over(**EXACT).ready()
    assert [one["tokens"] for one in reads.generate(asked)] == right
    reads.idle(cached=True)


def test_an_aborted_request_leaves_nothing_behind(over, tmp_path):
    asked = prompts(*LENGTHS)
    writes = over(page_size=16, **EXACT).ready()
    writes.generate(asked)
    written(tmp_path, 3)
    writes.close()
    hang = tmp_path / "hang"
    engine = over(environ={"KVPOOL_HANG": str(hang)}, page_size=16, **EXACT).ready()
    hang.touch()
    name = engine.add(asked[0])
    time.sleep(0.5)
    engine.send(do="abort", id=name)
    assert engine.finished(name)["tokens"] == []
    hang.unlink()
    engine.idle(cached=True)


def test_a_prefill_of_a_pair_reads_what_another_has_written(start, expected, tmp_path):
    asked, right = prompts(*LENGTHS), [one["tokens"] for one in expected("llama", **EXACT)]
    extra = {"store": f"file://{tmp_path}/store"}
    decode = start("decode", "llama", **EXACT).ready()
    for _ in range(2):
        prefill = start("prefill", "llama", extra=extra, **ENGINE, **EXACT).ready()
        got = handed_over(prefill, decode, asked)
        assert [one["tokens"] for one in got] == right
        written(tmp_path, 3)
        prefill.idle(cached=True)
        prefill.close()
    decode.idle()


def test_an_engine_that_cannot_have_one_says_so(over):
    engine = over(page_size=16, disable_radix_cache=True)
    assert engine.ended()
    assert "radix cache kvpool does not know disable_radix_cache. Use a radix" in engine.tail()


def test_weights_that_nothing_names_are_refused(over):
    engine = over(load_format="dummy")
    assert engine.ended()
    assert "nothing says which weights the model has" in engine.tail()
