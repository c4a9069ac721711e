"""vLLM and SGLang over one store: what one has computed the other goes on with. The tokens are
those of either engine alone, every live byte is equal in both engines' own tensors, and each engine
itself counts what it has not computed.
"""

from __future__ import annotations

import time

import pytest

from tests.engines.cross.hand_over import vllm_engine
from tests.engines.cross.test_cross import expected, start  # noqa: F401
from tests.engines.pair import LENGTHS, compare
from tests.engines.sglang.engines import Engine
from tests.engines.vllm.engines import prompts

HITS = [(length - 1) // 256 * 256 for length in LENGTHS]
SGLANG = {"disable_radix_cache": False, "radix_cache_backend": "kvpool"}
VLLM = {"enable_prefix_caching": True}
WAYS = {
    "vLLM to SGLang": (1, {"block_size": 32}, {"page_size": 16}),
    "SGLang to vLLM": (0, {"block_size": 128}, {"page_size": 1}),
    "vLLM's 2 ranks to SGLang": (
        1,
        {"tensor_parallel_size": 2, "block_size": 128},
        {"page_size": 16},
    ),
    "SGLang's 2 ranks to vLLM": (0, {"block_size": 32}, {"tp_size": 2, "page_size": 16}),
}


def written(folder, parts):
    until = time.monotonic() + 30
    while len(found := [p for p in folder.rglob("*.full") if "#" not in p.name]) < parts:
        assert time.monotonic() < until, found
        time.sleep(0.05)


@pytest.mark.parametrize("way", WAYS)
def test_one_engine_goes_on_with_what_the_other_has_computed(way, start, expected, tmp_path):  # noqa: F811
    first, vllm, sglang = WAYS[way]
    asked, right = prompts(*LENGTHS), expected("llama")
    extra = {"store": f"file://{tmp_path}/store"}
    (tmp_path / "store").mkdir()

    def of_vllm():
        return start(vllm_engine, "store", "llama", extra=extra, **VLLM, **vllm).ready()

    def of_sglang(side):
        environ = {"KVPOOL_WATCH_STORE": side}
        more = {"extra": extra, "environ": environ, **SGLANG, **sglang}
        return start(Engine, "single", "llama", **more).ready()

    def tokens(answer):
        return answer["tokens"] if isinstance(answer["tokens"][0], int) else answer["tokens"][0]

    writes = of_vllm() if first else of_sglang("prefill")
    got = [writes.generate([prompt])[0] for prompt in asked]
    assert [tokens(one) for one in got] == right
    assert [one["cached"] for one in got] == [0] * 4
    written(tmp_path / "store", 6 if "2 ranks" in way else 3)
    writes.close()
    reads = of_sglang("decode") if first else of_vllm()
    got = reads.generate(asked)
    assert [one["cached"] for one in got] == HITS
    assert [tokens(one) for one in got] == right
    tensors, nbytes, wrong = compare(tmp_path)
    assert not wrong
    assert tensors and nbytes
