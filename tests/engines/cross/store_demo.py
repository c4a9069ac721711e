"""`make store-demo`: what one engine has written to a store, others go on with, and back.

vLLM (TP 2, blocks of 128) writes prompts; vLLM (TP 1, blocks of 32), SGLang (pages of 16) and
`PoolCache` begin with them. And back: each of these writes them for another tenant, and the first
reads. Every answer must be the writer's, and what the reader computes without the store; each side
itself counts the tokens that it has not computed; and every byte that was read must be the
writer's, in both sides' own tensors. Models are tiny and have random weights, in float32. On a CPU
vLLM has qwen3_next in bfloat16 only, which two ranks round otherwise than one: there the first
token of each answer is compared. SGLang and `PoolCache` take part with llama.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table

from kvpool.layout.units import human
from tests.disagg.store.servers import serving
from tests.engines.chunks import whole_chunks
from tests.engines.cross.store_sides import EngineSide, Place, sglang_side, vllm_side
from tests.engines.demo import console, parser, shown
from tests.engines.launcher import end_launchers
from tests.engines.pool_side import PoolSide
from tests.engines.process import EngineFailed
from tests.engines.stored import Answer, Reading, Side, Written, read, recompute, write
from tests.engines.vllm.engines import prompts
from tests.engines.vllm.models import save


@dataclass(frozen=True)
class Model:
    """How vLLM runs it, with `blocks` of the engine of two ranks and of the one of one; the `first`
    tokens of answers are compared, or all.
    """

    blocks: tuple[int, int] = (128, 32)
    dtype: str = "float32"
    first: int | None = None


MODELS = {
    "llama": Model(),
    "gemma3": Model(),
    "gpt_oss": Model(),
    # a block that has room for a state
    "qwen3_next": Model((256, 256), "bfloat16", first=1),
    # all that vLLM's CPU kernel takes
    "deepseek_v3": Model((16, 16)),
}
FLOORS = {"file": tuple(MODELS), "mooncake": ("llama", "qwen3_next")}
"""Models over each, unless others are named."""
MOONCAKE_MEMORY = "256MiB"


def main() -> int:
    """0 where all tokens, counts and bytes are right; 1 where one is not, or an engine fails."""
    made = parser("store-demo", __doc__)
    add = made.add_argument
    few = f"(all over file, {' and '.join(FLOORS['mooncake'])} over mooncake)"
    add("--models", nargs="+", choices=MODELS, metavar="MODEL", help=f"{', '.join(MODELS)} {few}")
    add("--floors", nargs="+", choices=FLOORS, default=[*FLOORS], help="where objects lie (both)")
    options = made.parse_args()
    if not any(map(whole_chunks, options.prompt_tokens)):
        made.error("--prompt-tokens: one of 257 or more, a chunk and the token that is computed.")
    torch.set_num_threads(1)  # beside engines
    try:
        return shown("store-demo", options, _run)
    finally:
        end_launchers()


def _run(options: argparse.Namespace, folder: Path) -> bool:
    began, readings = time.monotonic(), list[Reading]()
    with _stderr_in(folder / "logs"):
        for floor in options.floors:
            for model in options.models or FLOORS[floor]:
                readings += _exchange(model, floor, options, folder)
    cached, nbytes = sum(sum(one.cached) for one in readings), sum(one.nbytes for one in readings)
    tensors, seconds = sum(one.tensors for one in readings), time.monotonic() - began
    console.print(
        f"{cached:,} tokens read and not computed; {nbytes:,} bytes of {tensors:,} tensors "
        f"compared; {seconds:.0f} s",
        highlight=False,
    )
    return not any(one.faults for one in readings)


@contextmanager
def _stderr_in(logs: Path) -> Iterator[None]:
    """What libraries of this process write goes to a log, as that of engines: transformers' bars,
    and what Mooncake writes of each client at any level of logging.
    """
    logs.mkdir(parents=True, exist_ok=True)
    own = os.dup(2)
    with open(logs / "demo.log", "ab") as log:
        os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(own, 2)
        os.close(own)


def _exchange(model: str, floor: str, options: argparse.Namespace, folder: Path) -> list[Reading]:
    lengths, chosen = " ".join(map(str, options.prompt_tokens)), MODELS[model]
    title = f"{model} in {chosen.dtype} over {floor}, prompts of {lengths} tokens"
    if chosen.first:
        title += ", first tokens compared"
    table = Table(
        "written by", "read by", "cached", "tensors", "wrong bytes", "answers", title=title
    )
    readings: list[Reading] = []
    with ExitStack() as stack:
        # also of a run that fails in between
        stack.callback(lambda: _print(table, readings))
        status = stack.enter_context(console.status(title))
        place = stack.enter_context(_place(model, floor, folder))
        sides = _started(stack, model, save(model, folder / "models"), place)
        for written, side, recomputed in _ways(sides, place.url, options):
            way = f"{written.side.name} to {side.name}"
            status.update(f"{title}: {way}")
            reading = read(written, side, recomputed, place.watched / way, first=chosen.first)
            readings.append(reading)
            table.add_row(written.side.name, side.name, *_cells(reading))
    return readings


@contextmanager
def _place(model: str, floor: str, folder: Path) -> Iterator[Place]:
    """An empty store of one model."""
    watched = folder / f"{model}-{floor}"
    if watched.exists():
        raise EngineFailed(f"{watched} is there, of another run. Choose another --folder.")
    (watched / "store").mkdir(parents=True)
    url, logs = f"file://{watched}/store", folder / "logs"
    with ExitStack() as stack:
        if floor == "mooncake":
            try:
                _, served = stack.enter_context(serving("--memory", MOONCAKE_MEMORY))
            except AssertionError as failure:
                raise EngineFailed(f"{failure}. Run it alone to see why.") from None
            url = served["url"]
        yield Place(url=url, watched=watched, logs=logs)


def _started(stack: ExitStack, model: str, path: Path, place: Place) -> list[Side]:
    """Engines of the model that have started, and a pool beside them; the first has two ranks."""
    began, engines, chosen = time.monotonic(), list[EngineSide](), MODELS[model]
    for tp, block_size in zip((2, 1), chosen.blocks):
        size = {"tp": tp, "block_size": block_size, "dtype": chosen.dtype}
        engines.append(stack.enter_context(vllm_side(path, place, **size)))
    others = []
    if model == "llama":
        engines.append(stack.enter_context(sglang_side(path, place, page_size=16)))
        watch = place.watch("PoolCache")
        others.append(stack.enter_context(PoolSide(path, place.url, watch)))
    names = "; ".join(side.name for side in engines)
    console.print(f"{model}: {names} are starting", highlight=False)
    for side in engines:
        side.engine.ready()
    console.print(f"they have started in {time.monotonic() - began:.0f} s", highlight=False)
    return [*engines, *others]


def _ways(
    sides: list[Side], url: str, options: argparse.Namespace
) -> Iterator[tuple[Written, Side, list[Answer]]]:
    """What was written, who reads it, and that side's answers without the store: all others read
    what the first has written, and the first what each of them has.
    """
    asked, tokens = prompts(*options.prompt_tokens), options.tokens
    forth, *back = [write(side, url, asked, tokens=tokens, tenant=side.name) for side in sides]
    alone = [recompute(side, asked, tokens) for side in sides]
    for side, answers in zip(sides[1:], alone[1:]):
        yield forth, side, answers
    for written in back:
        yield written, sides[0], alone[0]


def _print(table: Table, readings: list[Reading]) -> None:
    if readings:
        console.print(table)
    for reading in readings:
        for fault in reading.faults:
            console.print(fault, style="red", markup=False, highlight=False)


def _cells(reading: Reading) -> tuple[str, ...]:
    wrong = f"[red]in {reading.different} tensors" if reading.different else "0"
    count = len(reading.cached)
    colour = "" if reading.right == count else "[red]"
    return (
        " ".join(map(str, reading.cached)),
        f"{reading.tensors}",
        f"{wrong} of {human(reading.nbytes)}",
        f"{colour}{reading.right} of {count}",
    )


if __name__ == "__main__":
    sys.exit(main())
