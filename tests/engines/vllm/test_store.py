"""Engines over one store: what one has computed another begins with. The tokens are those of one
engine that computes all, every live byte is equal, by an oracle that reads vLLM's own tensors, and
vLLM itself counts what was not computed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engines.chunks import CHUNK, whole_chunks
from tests.engines.pair import EXACT, LENGTHS, compare
from tests.engines.vllm.engines import Engine, handed_over, prompts

CACHED = {"enable_prefix_caching": True}
TP = {"tensor_parallel_size": 2}
STATES = {"block_size": 256}
"""A state a block, which divides a chunk."""


class Stores:
    """Starts engines over one folder, whose oracles write to another."""

    def __init__(self, start: Any, folder: Path) -> None:
        self._start, self.floor, self.watched = start, folder / "floor", folder / "watched"
        self.floor.mkdir(), self.watched.mkdir()

    def engine(self, model: str, extra: dict[str, Any] | None = None, **options: Any) -> Engine:
        extra = {"store": f"file://{self.floor}", **(extra or {})}
        engine: Engine = self._start("store", model, extra=extra, watch=self.watched, **options)
        return engine

    def objects(self, kind: str = "full") -> list[Path]:
        """Objects that are whole."""
        return [path for path in self.floor.rglob(f"*.{kind}") if "#" not in path.name]

    def until_written(self, count: int, kind: str = "full") -> None:
        until = time.monotonic() + 30
        while len(self.objects(kind)) < count:
            assert time.monotonic() < until, len(self.objects(kind))
            time.sleep(0.05)

    @contextmanager
    def hanging(self, *calls: str) -> Iterator[None]:
        """These calls of all floors hang meanwhile."""
        holds = [self.watched / f"hold {name}" for name in calls]
        for hold in holds:
            hold.touch()
        try:
            yield
        finally:
            for hold in holds:
                hold.unlink()

    def assert_equal(self) -> None:
        """All that was read is what was written."""
        _, nbytes, wrong = compare(self.watched)
        assert nbytes and not wrong


@pytest.fixture
def stores(start, tmp_path):
    return Stores(start, tmp_path)


def tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    assert [one["reason"] for one in answers] == [["length"]] * len(answers)
    return [one["tokens"][0] for one in answers]


def test_a_conversation_goes_on_in_another_engine(stores, expected):
    """Prompts of another engine, and its answers, are not computed again."""
    one = stores.engine("llama", block_size=32, **CACHED, **EXACT)
    other = stores.engine("llama", block_size=128, **CACHED, **EXACT)
    asked = [*prompts(*LENGTHS), *prompts(500, seed=4)]
    first = one.ready().generate(asked)
    assert tokens(first)[:4] == expected("llama", **EXACT)
    assert [answer["cached"] for answer in first] == [0] * 5
    stores.until_written(5)
    again = other.ready().generate(asked)
    assert tokens(again) == tokens(first)
    assert [answer["cached"] for answer in again] == [whole_chunks(len(a)) for a in asked]
    # chunk 1 of the last prompt has twelve tokens of the answer
    turns = [[*a, *answer, 7, 8, 9] for a, answer in zip(asked, tokens(first))]
    second = other.generate(turns[-1:])
    assert second[0]["cached"] == 2 * CHUNK
    assert tokens(second) == tokens(one.generate(turns[-1:]))
    stores.assert_equal()
    one.idle()
    other.idle()


def test_tenants_share_nothing(stores):
    one = stores.engine("llama", **EXACT).ready()
    asked = prompts(300)
    one.generate(asked, salt="one")
    stores.until_written(1)
    assert one.generate(asked, salt="two")[0]["cached"] == 0
    assert one.generate(asked)[0]["cached"] == 0
    stores.until_written(3)
    assert one.generate(asked, salt="one")[0]["cached"] == CHUNK
    one.idle()


PAIRS = {
    "llama tp 2 to 1": ("llama", {"block_size": 32, **TP}, {"block_size": 128}),
    "llama tp 1 to 2": ("llama", {"block_size": 128}, {"block_size": 32, **TP}),
    "gemma3": ("gemma3", {"block_size": 32}, {"block_size": 64}),
    "gpt_oss tp 2 to 1": ("gpt_oss", {"block_size": 16, **TP}, {"block_size": 128}),
    "deepseek_v3": ("deepseek_v3", {}, {}),
}


WINDOWS = "gemma3", "gpt_oss"


@pytest.mark.parametrize("name", PAIRS)
def test_any_engine_reads_what_any_has_written(name, stores, expected):
    model, there, here = PAIRS[name]
    one = stores.engine(model, **CACHED, **EXACT, **there)
    other = stores.engine(model, **CACHED, **EXACT, **here)
    asked, right = prompts(*LENGTHS), expected(model, **EXACT)
    assert tokens(one.ready().generate(asked)) == right
    for kind in ("full", "window") if model in WINDOWS else ("full",):
        stores.until_written(3 * there.get("tensor_parallel_size", 1), kind)
    answers = other.ready().generate(asked)
    assert tokens(answers) == right
    assert [answer["cached"] for answer in answers] == [whole_chunks(n) for n in LENGTHS]
    assert tokens(other.generate(asked)) == right  # by its own cache
    stores.assert_equal()
    one.idle()
    other.idle()


def test_recurrent_state_goes_on_where_a_prompts_last_chunk_ends(stores):
    """In bfloat16, which is all that vLLM has on a CPU: both engines compute the same steps."""
    one, other = (stores.engine("qwen3_next", **CACHED, **STATES) for _ in range(2))
    asked = prompts(*LENGTHS)
    first = [one.ready().generate([each])[0] for each in asked]
    stores.until_written(2, "state")
    again = [other.ready().generate([each])[0] for each in asked]
    assert [answer["cached"] for answer in again] == [whole_chunks(n) for n in LENGTHS]
    assert tokens(again) == tokens(first)
    stores.assert_equal()
    one.idle()
    other.idle()


def test_what_does_not_come_is_computed(stores, expected):
    """A floor that hangs when it is asked, and one that hangs when it is read; an object that is
    cut, and one that is gone. Others are served meanwhile.
    """
    one = stores.engine("llama", **EXACT).ready()
    other = stores.engine("llama", {"store_timeout": 1.0}, **EXACT).ready()
    asked, right = prompts(*LENGTHS), expected("llama", **EXACT)
    one.generate(asked)
    stores.until_written(3)
    with stores.hanging("exists"):
        answers = other.generate(asked)
        assert tokens(answers) == right
        assert [answer["cached"] for answer in answers] == [0] * 4
        began = time.monotonic()
        assert tokens(other.generate(asked)) == right  # it waits for that floor no more
        other.generate(asked[1:2])
        assert time.monotonic() - began < 20
    assert eventually_cached(other, asked[:1]) == CHUNK
    with stores.hanging("read"):
        names = [other.add(prompt) for prompt in asked]
        assert tokens([other.finished(names[1])]) == right[1:2]  # nothing of it is stored
        answers = [other.finished(names[at]) for at in (0, 2, 3)]
        assert tokens(answers) == [right[at] for at in (0, 2, 3)]
        assert [answer["cached"] for answer in answers] == [0] * 3
    assert other.tail(200_000).count("did not answer within 1.0 s") >= 2
    assert eventually_cached(other, asked[:1]) == CHUNK
    for path in stores.objects():
        path.write_bytes(path.read_bytes()[:-1])
    assert tokens(other.generate(asked)) == right
    for path in stores.objects():
        path.unlink()
    assert tokens(other.generate(asked)) == right
    other.idle()
    stores.assert_equal()


def eventually_cached(engine: Engine, asked: list[list[int]]) -> int:
    """How many tokens of a prompt come from the store, once it answers again."""
    until = time.monotonic() + 30
    while not (cached := engine.generate(asked)[0]["cached"]):
        assert time.monotonic() < until
    return int(cached)


def test_noise_in_what_was_read_changes_the_tokens(stores):
    """The control: these prompts and this model can tell right state from wrong."""
    one = stores.engine("llama", **EXACT).ready()
    other = stores.engine("llama", noise=True, **EXACT).ready()
    asked = prompts(300, 513)
    first = one.generate(asked)
    stores.until_written(3)
    assert all(one != other for one, other in zip(tokens(first), tokens(other.generate(asked))))
    assert compare(stores.watched)[2]


def test_a_request_that_is_aborted_while_it_is_read_leaves_its_blocks(stores, expected):
    one, other = stores.engine("llama", **EXACT).ready(), stores.engine("llama", **EXACT).ready()
    asked, right = prompts(*LENGTHS), expected("llama", **EXACT)
    one.generate(asked)
    stores.until_written(3)
    with stores.hanging("read"):
        names = [other.add(prompt) for prompt in asked]
        other.finished(names[1])
        for name in names:
            other.send(do="abort", id=name)
        other.idle()
    assert tokens(other.generate(asked)) == right
    stores.assert_equal()
    other.idle()


def test_preempted_requests_read_their_own_state_back(stores):
    """There are blocks for about one and a half of these requests at their end."""
    few = {"num_gpu_blocks_override": 26, "max_model_len": 512, "block_size": 32}
    one = stores.engine("llama", **few, **EXACT).ready()
    asked = prompts(260, 280, seed=3)
    got = tokens(one.generate(asked, tokens=150))
    single = stores.engine("llama", {"store": "memory://other"}, block_size=32, **EXACT).ready()
    assert got == [tokens([single.generate([each], tokens=150)[0]])[0] for each in asked]
    stores.assert_equal()
    one.idle()


def test_prefill_and_decode_share_a_store(stores, expected):
    """Prefill begins with what is stored; decode stores what it has generated."""
    prefill, decode = (stores.engine("llama", **EXACT).ready() for _ in range(2))
    asked = [*prompts(*LENGTHS), *prompts(500, seed=4)]
    got = handed_over(prefill, decode, asked)
    assert got[:4] == expected("llama", **EXACT)
    stores.until_written(5)
    assert handed_over(prefill, decode, asked) == got
    third = stores.engine("llama", **EXACT).ready()
    answer = third.generate([[*asked[4], *got[4], 7]])[0]
    assert answer["cached"] == 2 * CHUNK
    stores.assert_equal()
    prefill.idle(), decode.idle()


def test_windows_are_not_handed_over_beside_a_store_with_prefix_caching(stores, expected):
    both = {**CACHED, **EXACT, "block_size": 32}
    prefill, decode = (stores.engine("gemma3", **both).ready() for _ in range(2))
    asked = prompts(*LENGTHS)
    assert handed_over(prefill, decode, asked) == expected("gemma3", **EXACT)
    text = decode.tail(200_000)
    assert "enable_prefix_caching with a store" in text
    assert "prefix caching is off" not in text


def test_random_weights_are_not_those_of_the_files(tmp_path):
    from disagg.connectors.vllm.connector import engine_conventions

    (tmp_path / "model.safetensors").write_bytes(b"weights")
    revision = SimpleNamespace(resolved="0" * 40)
    model = SimpleNamespace(
        hf_text_config={}, revision=revision, model=str(tmp_path), quantization=None
    )

    def said(load_format):
        load = SimpleNamespace(load_format=load_format)
        config = SimpleNamespace(model_config=model, speculative_config=None, load_config=load)
        return engine_conventions(config)

    assert {"weights", "revision"} <= said("auto").keys()
    assert not {"weights", "revision"} & said("dummy").keys()
