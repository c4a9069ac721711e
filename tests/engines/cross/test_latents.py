"""vLLM's and SGLang's pools of DSA and of DeepSeek-V4: a request moves between tensors that each
engine's own classes have laid out, or the pair is refused by what their bytes mean.
"""

from __future__ import annotations

import os
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest

from disagg import DecodeEndpoint, HandshakeRefused, KVPoll, PrefillEndpoint, create_engine
from disagg.connectors.sglang.conventions import engine_conventions
from tests.engines.cross.latents import CONFIGS, TOKENS, value
from tests.engines.launcher import ROOT
from tests.engines.sglang import oracle, sides
from tests.engines.sglang.pairings import side
from tests.engines.sglang.sides import address_of, described

PATIENCE = 60.0
FUSED = SimpleNamespace(use_dsa_indexer_fusion=True, use_aiter_fused_fp8_writer=False)
APART = SimpleNamespace(use_dsa_indexer_fusion=False, use_aiter_fused_fp8_writer=False)
V4 = SimpleNamespace(is_in_indexer=True)
KEYS = {"row": "row", "index": "key", "index scale": "scale"}
"""What vLLM's rank calls the rows of SGLang's."""


@pytest.fixture(autouse=True)
def one_rank():
    with sides.alone():
        yield


@pytest.fixture(scope="module")
def vllm():
    """A process of vLLM's environment: sends it a line, and returns its answer."""
    command = [os.environ["KVPOOL_VLLM_PYTHON"], "-m", "tests.engines.cross.latents"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environ = os.environ | {"PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR"}
    with subprocess.Popen(command, cwd=ROOT, env=environ, **pipes) as process:

        def ask(*words):
            print(*words, file=process.stdin, flush=True)
            return process.stdout.readline().strip() if words else ""

        yield ask
        process.stdin.close()


def sglang_rank(kind, indexer):
    """SGLang's pool and a request, their layout, block table and conventions."""
    config = CONFIGS[kind]
    if kind == "dsa":
        shared = [n for n, kept in enumerate(config["index_topk_pattern"]) if kept == "S"]
        one = side(sides.dsa(8, skip=shared), 3, TOKENS)
    else:
        one = side(sides.dsv4(config["compress_ratios"]), 3, TOKENS, 8, row=2)
    made = described(one, config["num_hidden_layers"])
    model = SimpleNamespace(hf_text_config=config, model_path="/models/tiny", quantization=None)
    return one, made.layout, address_of(made, one), engine_conventions(model, [indexer])


def rows(one):
    """A request's rows in SGLang's own tensors, and the bytes that each must have."""
    for (_, layer, what), held in oracle.rows_of(one).items():
        size = held.tensor.shape[-1]
        expected = [value(layer, KEYS[what], int(n), size) for n in held.numbers]
        yield held.tensor, held.index(held.numbers), np.stack(expected)


def test_vllm_prefills_what_sglangs_fused_indexers_read(vllm):
    """GLM-5: both keep plain index keys, of the layers that have an indexer."""
    one, layout, table, said = sglang_rank("dsa", FUSED)
    address = vllm("dsa", "prefill")
    with DecodeEndpoint(layout, create_engine("local"), conventions=said) as decode:
        decode.connect([address], timeout=PATIENCE)
        decode.receive("room", table)
        assert decode.wait("room", PATIENCE) is KVPoll.Success, decode.failure("room")
    vllm()
    count = 0
    for tensor, spots, expected in rows(one):
        assert np.array_equal(tensor[spots].numpy().reshape(expected.shape), expected)
        count += 1
    assert count == 8 + 2 * 3


def test_sglang_prefills_what_vllm_reads(vllm):
    one, layout, table, said = sglang_rank("dsa", FUSED)
    for tensor, spots, expected in rows(one):
        tensor[spots] = tensor.new_tensor(expected).reshape(tensor[spots].shape)
    with PrefillEndpoint(layout, create_engine("local"), conventions=said) as prefill:
        prefill.send("room", table)
        assert vllm("dsa", "decode", prefill.address) == "equal"


REFUSED = {
    ("dsa", "prefill"): ["index_keys: 'plain' on prefill, 'hadamard' on decode"],
    ("dsa", "decode"): ["index_keys: 'hadamard' on prefill, 'plain' on decode"],
    ("v4", "prefill"): [
        "compressor_scores: 'biased' on prefill, 'plain' on decode",
        "index_keys: 'plain' on prefill, 'hadamard' on decode",
    ],
    ("v4", "decode"): [
        "compressor_scores: 'plain' on prefill, 'biased' on decode",
        "index_keys: 'hadamard' on prefill, 'plain' on decode",
    ],
}


@pytest.mark.parametrize(("kind", "role"), REFUSED)
def test_bytes_that_mean_something_else_are_refused_by_name(kind, role, vllm):
    """`role`: vLLM's. A decode that says nothing is not refused: the layouts match."""
    _, layout, _, said = sglang_rank(kind, V4 if kind == "v4" else APART)
    if role == "prefill":
        address, refused = vllm(kind, role), pytest.raises(HandshakeRefused)
        with DecodeEndpoint(layout, create_engine("local"), conventions=said) as decode, refused:
            decode.connect([address], timeout=PATIENCE)
        with DecodeEndpoint(layout, create_engine("local")) as decode:
            decode.connect([address], timeout=PATIENCE)
        vllm()
        text = " ".join(str(refused.excinfo.value).split("\n"))
    else:
        with PrefillEndpoint(layout, create_engine("local"), conventions=said) as prefill:
            text = vllm(kind, role, prefill.address)
    assert [reason for reason in REFUSED[kind, role] if reason not in text] == []
    assert text.count(" on prefill, ") == len(REFUSED[kind, role])
    assert "in the same engine where it is the engine that decides" in text
