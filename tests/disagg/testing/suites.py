"""A suite of few rows, and what stands in for its servers."""

from __future__ import annotations

from disagg.testing.judge import Observation

TEXT = """
[engines.vllm]
pythonpath = "..:site"
[engines.sglang]
python = "venv/bin/python"
env = {OMP_NUM_THREADS = "1"}
[models]
llama = ["vllm", "-m", "maker", "{folder}", "llama"]
eagle = "drafts/eagle"
[defaults]
connector = "kvpool"
model = "llama"
side = {engine = "vllm", block_size = 32}
[[pair]]
prefill = {tp = 2}
decode = {block_size = 128}
[[pair]]
name = "draft"
prefill = {draft = "eagle", method = "eagle"}
decode = {draft = "eagle", method = "eagle", args = {max_model_len = 512}}
[[pair]]
connector = "sglang-nixl"
side = {engine = "sglang", dtype = "float32"}
prompts = [9]
new_tokens = 4
"""
FIRST = "kvpool: llama, vllm 32 tp2 to vllm 128"
LAST = "sglang-nixl: llama, sglang 32 float32 to sglang 32 float32"
NAMES = [FIRST, "draft", LAST]
GOOD = Observation(differences="", versions={"vllm": "0.32.0"})
BAD = Observation(differences="decode layer 3 k, token 17: 12, 34 on prefill")
REFUSED = Observation(refused="block sizes <32> and 128 | differ")
AWAY = Observation(here="nixl is not installed")


class Servers:
    """In place of the arena: what each row shows in every run, or in each of a list's."""

    def __init__(self, shown):
        self.shown, self.ran = shown, []

    def observe(self, pair):
        self.ran.append(pair.name)
        shown = self.shown.get(pair.name, GOOD)
        if isinstance(shown, list):
            shown = shown[self.ran.count(pair.name) - 1]
        if isinstance(shown, BaseException):
            raise shown
        return shown
