"""`kvpool demo`: a real transformer prefills in one process and decodes in another.

Both build the same model, as its random weights have a fixed seed. The result is compared with runs
in one process, over a pool of the same kind and over transformers' own cache.
"""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from disagg.cli.common import need_known
from disagg.cli.demo.models import MODELS, DemoSettings
from disagg.engines.base import EngineUnavailable, engine_class, engine_names
from kvpool.cli import check_output
from kvpool.extras import needs
from kvpool.layout.dtypes import PACKINGS

PROBLEMS = (MemoryError, OSError, OverflowError, RuntimeError, TimeoutError, ValueError)
MODEL_DTYPES = ("float32", "bfloat16", "float16")


_Model = Annotated[
    str, typer.Option(help=f"Model family: {', '.join(MODELS)}.", autocompletion=lambda: [*MODELS])
]
_ENGINES = f"Transfer engine: {', '.join(engine_names())}."
_Engine = Annotated[str, typer.Option(help=_ENGINES, autocompletion=engine_names)]
_PromptTokens = Annotated[list[int], typer.Option(min=1, help="Length of a prompt; repeatable.")]
_NewTokens = Annotated[int, typer.Option(min=1, help="Tokens to decode.")]
_ChunkTokens = Annotated[int, typer.Option(min=1, help="Tokens per prefill chunk.")]
_PrefillPage = Annotated[
    int, typer.Option(min=0, help="Tokens per page on prefill (0: the family's default).")
]
_DecodePage = Annotated[int, typer.Option(min=0, help="Tokens per page on decode.")]
_Dtype = Annotated[str, typer.Option(help=f"Dtype of the model: {', '.join(MODEL_DTYPES)}.")]
_Packing = Annotated[
    str, typer.Option(help="Packing of the pool: a dtype, fp8 or mxfp8 (default: the dtype).")
]
_Device = Annotated[str, typer.Option(help="Device of models and pools: cpu, cuda:0, npu:0.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object; all else on stderr.")]
_Timeline = Annotated[
    Path | None, typer.Option(help="Draw the hand-offs in time to a page (.html).")
]


def demo(
    model: _Model = "llama",
    engine: _Engine = "local",
    prompt_tokens: _PromptTokens = [2000],  # noqa: B006
    new_tokens: _NewTokens = 64,
    chunk_tokens: _ChunkTokens = 512,
    prefill_page: _PrefillPage = 0,
    decode_page: _DecodePage = 0,
    dtype: _Dtype = "float32",
    packing: _Packing = "",
    device: _Device = "cpu",
    as_json: _AsJson = False,
    timeline: _Timeline = None,
) -> None:
    """Prefill in one process, decode in another, and compare.

    Beside them the same prompts are run in a single process. Exit status 1 if a logit of a decoded
    step or a live byte of the decode pool differs.

    JSON: model, engine, device, dtype, packing; passed; failure (what ended it early, or null);
    prompts (tokens, bytes, runs, bytes_per_second, bind_seconds; checks, each with passed and
    found).

    \b
    Example:
      kvpool demo --model qwen3_next --engine nixl --decode-page 16
    """
    from kvpool.render.chart import SUFFIXES

    need_known("--model", [model], MODELS)
    need_known("--engine", [engine], engine_names())
    need_known("--dtype", [dtype], MODEL_DTYPES)
    need_known("--packing", [packing or dtype], (dtype, *PACKINGS))
    if find_spec("transformers") is None:
        raise typer.BadParameter(f"the demo {needs('transformers')}")
    check_output("--timeline", timeline, SUFFIXES)
    settings = DemoSettings(
        model=model,
        engine=engine,
        prompts=tuple(prompt_tokens),
        chunk_tokens=chunk_tokens,
        new_tokens=new_tokens,
        dtype=dtype,
        packing=packing or dtype,
        threads=max(1, (multiprocessing.cpu_count() or 2) // 2),
        prefill_page=prefill_page,
        decode_page=decode_page,
        device=device,
    )
    if not _played(settings, as_json, timeline):
        raise typer.Exit(1)


def _played(settings: DemoSettings, as_json: bool, timeline: Path | None) -> bool:
    """Runs the demo and prints its result. Whether it has passed."""
    from rich.console import Console

    from disagg.cli.demo.sides import Comparison, DecodedPrompt, PrefillSide, decoded_prompts
    from kvpool.device import get_device
    from kvpool.process import OtherProcess

    console, failure = Console(stderr=as_json), None
    prompts: list[DecodedPrompt] = []
    try:
        get_device(settings.device)
        if (reason := engine_class(settings.engine).availability()) is not None:
            raise EngineUnavailable(f"engine {settings.engine!r}: {reason}")
        with OtherProcess(PrefillSide, name="prefill") as process:
            for prompt in decoded_prompts(process, settings, console, timeline):
                prompts.append(prompt)  # those before a failure are kept
    except PROBLEMS as error:
        failure = str(error) or type(error).__name__
        Comparison(False, failure).print(console)
    passed = failure is None and all(check.passed for prompt in prompts for check in prompt.checks)
    if as_json:
        names = ("model", "engine", "device", "dtype", "packing")
        result = {name: getattr(settings, name) for name in names}
        result |= {"passed": passed, "failure": failure, "prompts": [*map(asdict, prompts)]}
        typer.echo(json.dumps(result))
    return passed
