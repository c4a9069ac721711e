"""`make cross-demo`: vLLM prefills and SGLang decodes, and the other way round.

Four engine processes on this machine, with one tiny model of random weights: each engine alone and
both pairs must give the same greedy tokens, and every byte of state must be equal in both engines'
own tensors.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.table import Table

from tests.engines.cross.hand_over import from_sglang, from_vllm, vllm_engine
from tests.engines.demo import console, pair_parser, shown
from tests.engines.pair import compare
from tests.engines.sglang.engines import Engine
from tests.engines.vllm import models
from tests.engines.vllm.engines import prompts


def main() -> int:
    """0 where all tokens and bytes are equal, 1 where one differs or an engine fails."""
    made = pair_parser("cross-demo", __doc__)
    made.add_argument("--block-size", type=int, default=32, help="tokens a block of vLLM (32)")
    made.add_argument("--page-size", type=int, default=16, help="tokens a page of SGLang (16)")
    return shown("cross-demo", made.parse_args(), _run)


def _run(options: argparse.Namespace, folder: Path) -> bool:
    asked, model = prompts(*options.prompt_tokens), models.save(options.model, folder)
    common = {"dtype": "float32", "extra": {"engine": options.engine}}

    def vllm(role: Any, watch: Path) -> Any:
        size = {"block_size": options.block_size, "watch": watch}
        return vllm_engine(role, model, folder / "logs", **common, **size)

    def sglang(role: Any, watch: Path) -> Any:
        size = {"page_size": options.page_size, "watch": watch}
        return Engine(role, model, folder / "logs", **common, **size)

    alone = []
    for name, start in (("vLLM", vllm), ("SGLang", sglang)):
        with console.status(f"{name} alone"), closing(start("single", folder)) as engine:
            engine.ready()
            made = [engine.generate([one], tokens=options.tokens)[0]["tokens"] for one in asked]
            alone.append([one[0] if name == "vLLM" else one for one in made])
    good = alone[0] == alone[1]
    same = "the same" if good else "[red]not the same"
    console.print(f"Each engine alone: {same} tokens.")
    table = Table("prefill", "decode", "tokens", "bytes", title=options.model)
    for first, one, second, other, hand_over in (
        ("vLLM", vllm, "SGLang", sglang, from_vllm),
        ("SGLang", sglang, "vLLM", vllm, from_sglang),
    ):
        watch = folder / f"{first}-to-{second}"
        watch.mkdir()
        with (
            console.status(f"{first} to {second}"),
            closing(one("prefill", watch)) as prefill,
            closing(other("decode", watch)) as decode,
        ):
            got = hand_over(prefill.ready(), decode.ready(), asked, options.tokens)
        _, nbytes, wrong = compare(watch)
        equal = sum(mine == theirs for mine, theirs in zip(got, alone[0]))
        good &= equal == len(asked) and not wrong and nbytes > 0
        state = f"{nbytes / 2**20:.2f} MiB equal" if not wrong else f"[red]{len(wrong)} differ"
        table.add_row(first, second, f"{equal} of {len(asked)} the same", state)
    console.print(table)
    return good


if __name__ == "__main__":
    sys.exit(main())
