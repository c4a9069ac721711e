"""`make cross-demo`: vLLM prefills and SGLang decodes, and the other way round.

Four engine processes on this machine, with one tiny model of random weights: each engine alone and
both pairs must give the same greedy tokens, and every byte of state must be equal in both engines'
own tensors.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.engines.cross.hand_over import compare, from_sglang, from_vllm, vllm_engine
from tests.engines.process import EngineFailed
from tests.engines.sglang.engines import Engine
from tests.engines.vllm import models
from tests.engines.vllm.engines import prompts

console = Console(width=None if sys.stdout.isatty() else 100)
Asked = list[list[int]]


def main() -> int:
    """0 where all tokens and bytes are equal, 1 where one differs or an engine fails."""
    given = _arguments()
    folder = Path(given.folder or tempfile.mkdtemp(prefix="kvpool-cross-demo-"))
    try:
        return _run(given, folder)
    except EngineFailed as failure:
        console.print(str(failure), markup=False, style="red")
        return 1
    except KeyboardInterrupt:
        return 1
    finally:
        console.print(f"logs: {folder}/logs", highlight=False)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make cross-demo CROSS_DEMO=...", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--model", default="llama", choices=models.MODELS, help="which tiny model")
    parser.add_argument(
        "--engine", default="local", help="what moves bytes: local, nixl, mooncake (local)"
    )
    parser.add_argument("--block-size", type=int, default=32, help="tokens a block of vLLM (32)")
    parser.add_argument("--page-size", type=int, default=16, help="tokens a page of SGLang (16)")
    parser.add_argument(
        "--prompt-tokens", type=int, nargs="+", default=[300, 77, 16, 513], help="(300 77 16 513)"
    )
    parser.add_argument("--tokens", type=int, default=24, help="to decode (24)")
    parser.add_argument("--folder", help="for the model and logs (a new one under /tmp)")
    return parser.parse_args()


def _run(given: argparse.Namespace, folder: Path) -> int:
    asked, model = prompts(*given.prompt_tokens), models.save(given.model, folder)
    common = {"dtype": "float32", "extra": {"engine": given.engine}}

    def vllm(role: Any, watch: Path) -> Any:
        size = {"block_size": given.block_size, "watch": watch}
        return vllm_engine(role, model, folder / "logs", **common, **size)

    def sglang(role: Any, watch: Path) -> Any:
        size = {"page_size": given.page_size, "watch": watch}
        return Engine(role, model, folder / "logs", **common, **size)

    table = Table("prefill", "decode", "tokens", "bytes", "seconds", title=given.model)
    alone: list[Asked] = []
    for name, start in (("vLLM", vllm), ("SGLang", sglang)):
        with console.status(f"{name} alone"), closing(start("single", folder)) as engine:
            engine.ready()
            began = time.monotonic()
            each = [engine.generate([one], tokens=given.tokens)[0]["tokens"] for one in asked]
            alone.append([one[0] if name == "vLLM" else one for one in each])
            table.add_row(name, name, "", "", f"{time.monotonic() - began:.2f}")
    good = alone[0] == alone[1]
    pairs: list[tuple[str, Any, str, Any, Callable[..., Asked]]] = [
        ("vLLM", vllm, "SGLang", sglang, from_vllm),
        ("SGLang", sglang, "vLLM", vllm, from_sglang),
    ]
    for first, one, second, other, hand_over in pairs:
        watch = folder / f"{first}-to-{second}"
        watch.mkdir()
        with (
            console.status(f"{first} to {second}"),
            closing(one("prefill", watch)) as prefill,
            closing(other("decode", watch)) as decode,
        ):
            prefill.ready(), decode.ready()
            began = time.monotonic()
            got = hand_over(prefill, decode, asked, given.tokens)
            took = time.monotonic() - began
        nbytes, wrong = compare(watch)
        same = sum(mine == theirs for mine, theirs in zip(got, alone[0]))
        good &= same == len(asked) and not wrong and nbytes > 0
        state = f"{nbytes / 2**20:.2f} MiB equal" if not wrong else f"[red]{len(wrong)} differ"
        table.add_row(first, second, f"{same} of {len(asked)} the same", state, f"{took:.2f}")
    console.print(table)
    console.print("[green]PASS" if good else "[red]FAIL")
    return not good


if __name__ == "__main__":
    sys.exit(main())
