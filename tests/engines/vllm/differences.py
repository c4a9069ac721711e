"""`python -m tests.engines.vllm.differences`: what differs between the two sides, by connector.

Each model and each difference is run with kvpool's connector and with vLLM's own NixlConnector, two
engine processes each, against the tokens of a single engine. A cell says what came out: `serves`
(every token is right), `refuses` (an error before any token), `WRONG` (tokens of another text, and
no error), `hangs`, or `ends` (an engine process ended).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.engines.pair import LENGTHS
from tests.engines.vllm.engines import PREFILL, Engine, EngineFailed, Role, prompts
from tests.engines.vllm.models import save

MODELS = ("llama", "deepseek_v3", "gpt_oss", "gemma3", "qwen3_next")
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
CONNECTORS: dict[str, dict[str, Any]] = {
    "kvpool": {"extra": {"engine": "local", "peer_timeout": 10}},
    "NixlConnector": {"connector": NIXL},
}
PORTS = {"prefill": "15800", "decode": "15900"}
SECONDS = 90.0
Options = dict[str, Any]
Ask = Callable[..., list[list[int]]]


@dataclass(frozen=True)
class Difference:
    """What each side is started with; `other` is prefill's model where it is not decode's."""

    prefill: Options = field(default_factory=dict)
    decode: Options = field(default_factory=dict)
    other: str = ""
    asked: int = 1
    models: Sequence[str] = MODELS


LLAMA = ("llama",)
EXACT = MODELS[:-1]
"""Those that vLLM computes in float32 on a CPU: sums of two ranks round as those of one."""
CACHE = {"enable_prefix_caching": True}
DIFFERENCES = {
    "none": Difference(),
    "block 64 to 32": Difference({"block_size": 64}, {"block_size": 32}),
    "block 32 to 64": Difference({"block_size": 32}, {"block_size": 64}),
    "block 128 to 32": Difference({"block_size": 128}, {"block_size": 32}, models=LLAMA),
    "block 32 to 128": Difference({"block_size": 32}, {"block_size": 128}, models=LLAMA),
    "TP 2 to 1": Difference({"tensor_parallel_size": 2}, {}, models=EXACT),
    "TP 1 to 2": Difference({}, {"tensor_parallel_size": 2}, models=EXACT),
    "prefix cache on both": Difference(CACHE, CACHE, asked=2),
    "prefix cache on decode": Difference({}, CACHE, asked=2),
    "float32 to bfloat16": Difference({}, {"dtype": "bfloat16"}, models=LLAMA),
    "another model": Difference(other="gpt_oss", models=LLAMA),
}


def outcome(connector: str, model: str, case: Difference, folder: Path, wanted: Any) -> str:
    """What came out of one cell."""
    engines: list[Engine] = []
    try:
        for role, options, name in (
            ("prefill", case.prefill, case.other or model),
            ("decode", case.decode, model),
        ):
            engines.append(start(role, name, folder, connector, options))
        prefill, decode = (engine.ready() for engine in engines)
        asked, found = prompts(*LENGTHS), []
        for _ in range(case.asked):
            first = prefill.generate(asked, tokens=1, params=[dict(PREFILL) for _ in asked])
            names = [decode.add(prompt, params=one["params"]) for prompt, one in zip(asked, first)]
            found = [decode.finished(name, timeout=SECONDS) for name in names]
    except EngineFailed:
        ended = [engine.role for engine in engines if not engine.alive()]
        return f"ends ({', '.join(ended)})" if ended else "hangs"
    finally:
        for engine in engines:
            engine.kill()
            engine.close()
    got = [one["tokens"][0] for one in found]
    if got == wanted:
        return "serves"
    if all(one["reason"] == ["error"] or not one["tokens"][0] for one in found):
        return "refuses"
    right = sum(a == b for one, known in zip(got, wanted) for a, b in zip(one, known))
    return f"WRONG ({right} of {sum(len(known) for known in wanted)} tokens)"


def start(role: Role, model: str, folder: Path, connector: str, options: Options) -> Engine:
    """One side, over that connector."""
    given = {"dtype": kind(model), **CONNECTORS[connector], **options}
    ports = {"VLLM_NIXL_SIDE_CHANNEL_PORT": PORTS[role]}
    return Engine(role, save(model, folder), folder / "logs", environ=ports, **given)


def kind(model: str) -> str:
    """Sums of bfloat16 round otherwise in other batches; linear attention knows nothing else."""
    return "bfloat16" if model == "qwen3_next" else "float32"


def alone(model: str, folder: Path) -> list[list[int]]:
    """Tokens of one engine, each prompt alone; with linear attention its last token in a step of
    its own, as a decode engine computes it.
    """
    arguments = {"dtype": kind(model)}
    with Engine("single", save(model, folder), folder / "logs", **arguments).ready() as engine:
        split = model == "qwen3_next"
        each = [engine.generate([one], split=split)[0] for one in prompts(*LENGTHS)]
    return [one["tokens"][0] for one in each]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--differences", nargs="+", default=list(DIFFERENCES))
    parser.add_argument("--connectors", nargs="+", default=list(CONNECTORS))
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kvpool-differences-"))
    console = Console(width=140)
    wanted = {model: alone(model, folder) for model in given.models}
    rows = [
        (model, name)
        for model in given.models
        for name in given.differences
        if model in DIFFERENCES[name].models
    ]
    table = Table("model", "difference", *given.connectors)
    for model, name in track(rows, console=console):
        cells = [
            outcome(connector, model, DIFFERENCES[name], folder, wanted[model])
            for connector in given.connectors
        ]
        console.print(model, name, *cells, sep=" | ")
        table.add_row(model, name, *cells)
    console.print(table)
    console.print(f"logs: {folder}")


if __name__ == "__main__":
    main()
