"""A store in a folder beside copies of its files: hits of 2,048 and 8,192 tokens into pages of 16,
lookups, what the caller of `ask` and `write` waits for, and what a hit costs a scheduler's thread.
"""

from __future__ import annotations

import shutil
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from disagg.connectors.settings import Settings
from disagg.connectors.vllm_store.requests import StoredRequests
from disagg.store import Store
from kvpool import MHAPool
from tests.bench.conftest import shuffled

PAGE = 16
SHAPE = {"layers": range(16), "num_kv_heads": 8, "head_dim": 128, "dtype": "bf16"}
"""64 KiB a token: a chunk is 16 MiB."""


def pool(tokens):
    return MHAPool(**SHAPE, num_pages=tokens // PAGE + 1, page_size=PAGE)


def prompt(tokens, seed=0):
    return np.random.default_rng(seed).integers(0, 30_000, tokens)


def filled(url, tokens):
    """A store with a prompt's chunks, and the pool that they were written from."""
    holder = pool(tokens)
    store = Store(url, holder.layout, room=1 << 31)
    store.write(prompt(tokens), shuffled(tokens // PAGE, 0, PAGE))
    while store.stats().queued_bytes:
        time.sleep(0.01)
    assert store.stats().counts["written"] == tokens // 256
    return holder, store


@pytest.mark.parametrize("tokens", [2048, 8192])
def test_hits_beside_copies_of_the_files(tokens, tmp_path, paired, timed):
    tokens = tokens if timed else 512
    _, store = filled(f"file://{tmp_path}/floor", tokens)
    files = sorted(tmp_path.rglob("*.full"))
    copies = tmp_path / "copies"
    copies.mkdir()
    asked, address = store.keys(prompt(tokens)), shuffled(tokens // PAGE, 1, PAGE)

    def ours():
        assert store.wait(store.read(asked, address)).failure is None

    def reference():
        for number, file in enumerate(files):
            shutil.copyfile(file, copies / f"{number}")

    paired(ours, reference, rounds=10)
    store.close()


def test_a_lookup_beside_a_stat_of_each_file(tmp_path, paired, timed):
    tokens = 8192 if timed else 512
    _, store = filled(f"file://{tmp_path}/floor", tokens)
    files = [str(file) for file in tmp_path.rglob("*.full")]
    asked = store.keys(prompt(tokens))
    assert len(asked.keys) == tokens // 256

    def ours():
        assert store.lookup(asked) == tokens

    paired(ours, lambda: [Path(file).stat() for file in files])
    store.close()


def test_what_a_scheduler_waits_for_beside_hashing(tmp_path, paired, timed):
    """`ask` and `read` of 8,192 tokens, whose keys are known, beside making these keys."""
    tokens = 8192 if timed else 512
    _, store = filled(f"file://{tmp_path}/floor", tokens)
    tokens_asked, address = prompt(tokens), shuffled(tokens // PAGE, 1, PAGE)
    asked = store.keys(tokens_asked)
    jobs = []

    def ours():
        jobs.append(store.read(asked, address))
        store.ended()

    paired(ours, lambda: store.keys(tokens_asked).keys)
    for job in jobs:
        store.abort(job)
    store.close()


WEIGHTS = {"weights": "w"}
NO_BLOCKS = SimpleNamespace(select_transfer_block_ids=list, transfer_group_ids=(0,))


class Scheduler:
    """What vLLM's scheduler calls for a request whose first `tokens` tokens are stored."""

    def __init__(self, url, layout, tokens):
        settings = Settings.read({"store": url}, "test")
        self.requests = StoredRequests(settings, NO_BLOCKS, unit=PAGE)
        self.requests.open([SimpleNamespace(layout=layout.to_msgpack(), conventions=WEIGHTS)])
        self.prompt, self.tokens = [*prompt(tokens).tolist(), 7], tokens
        self.ids = [range(1, tokens // PAGE + 2)]
        self._numbers = count()

    def request(self):
        return SimpleNamespace(
            request_id=f"request {next(self._numbers)}",
            prompt_token_ids=self.prompt,
            all_token_ids=self.prompt,
            num_prompt_tokens=len(self.prompt),
            num_computed_tokens=0,
            prompt_embeds=None,
            pooling_params=None,
            lora_request=None,
            resumable=False,
            mm_features=[],
            cache_salt=None,
            skip_reading_prefix_cache=False,
        )

    def hit(self):
        """From its arrival to the step after its read; the steps between are those of others."""
        request, requests = self.request(), self.requests
        requests.arrived(request)
        while (more := requests.matched(request, 0)[0]) is None:
            requests.step()
            time.sleep(0.001)
        assert more == self.tokens
        requests.allocated(request, SimpleNamespace(get_block_ids=lambda: self.ids), more)
        assert requests.step().reads
        received = SimpleNamespace(finished_recving={request.request_id}, failed_recving=set())
        requests.received(received)
        request.num_computed_tokens = more
        assert requests.matched(request, more) == (0, False)
        state = SimpleNamespace(resolve_block_ids=lambda _: self.ids, boundary_state_offloads={})
        running = SimpleNamespace(req_ids=[request.request_id], resumed_req_ids=set())
        requests.scheduled(
            SimpleNamespace(
                num_scheduled_tokens={request.request_id: 1},
                kv_connector_block_state=state,
                scheduled_cached_reqs=running,
            )
        )
        assert not requests.step().writes
        requests.finished(request)


@pytest.mark.benchmark(timer=time.thread_time)
def test_a_hit_in_a_schedulers_thread_beside_hashing(tmp_path, paired, timed):
    """Processor time of the thread that a hit of 8,192 tokens takes, beside making its keys."""
    tokens = 8192 if timed else 512
    url = f"file://{tmp_path}/floor"
    holder = MHAPool(**SHAPE | {"layers": range(1)}, num_pages=tokens // PAGE + 1, page_size=PAGE)
    scheduler = Scheduler(url, holder.layout, tokens)
    with Store(url, holder.layout, conventions=WEIGHTS) as store:
        store.write(prompt(tokens), shuffled(tokens // PAGE, 0, PAGE))
    with Store(url, holder.layout) as other:
        paired(scheduler.hit, lambda: other.keys(scheduler.prompt[:-1]).keys, rounds=100)
    scheduler.requests.close()
