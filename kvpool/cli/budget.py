"""`kvpool budget`: bytes of a model's state, and what fits into memory, from its config."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import fields
from importlib import resources
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpool.cli.memory import NAMES, memory_of, weights_option, weights_words
from kvpool.cli.output import fail
from kvpool.layout.dtypes import ALIASES, PACKINGS, dtype_name
from kvpool.layout.text import counted, nearest, ranges
from kvpool.layout.units import human
from kvpool.pools.placement import ITEM_COUNTS

if TYPE_CHECKING:
    from rich.table import Table

    from kvpool.models import Declaration
    from kvpool.models.sizing import Figures, PipelineStage, RoleBytes

DTYPE_NAMES = ("bf16", "fp16", "fp32", "e4m3", "e5m2")
"""Dtypes as help and errors list them; each may be given by any of its names."""


def model_names() -> list[str]:
    """The shipped configs, for shell completion: `kvpool.models.shipped` would import torch."""
    configs = resources.files("kvpool") / "models" / "configs"
    return sorted(path.name.removesuffix(".json") for path in configs.iterdir())


_Config = Annotated[
    str,
    typer.Argument(
        help="A config.json, a directory that holds one, or the name of a shipped config, "
        "such as deepseek_v32.",
        autocompletion=model_names,
    ),
]
_Memory = Annotated[
    str,
    typer.Option(
        help=f"Memory of each rank: 80GiB, 80GB, bytes (1048576 or more), or what a program gets "
        f"of a device: {NAMES}."
    ),
]
_Weights = Annotated[
    str | None,
    typer.Option(
        help="Weights on each rank: a size, or none. Default: those of the safetensors files "
        "beside the config, else an estimate from its dimensions."
    ),
]
_Utilisation = Annotated[
    float,
    typer.Option(help="Fraction of the memory for weights and state; activations have the rest."),
]
_Tp = Annotated[int, typer.Option(min=1, max=1 << 16, help="Shards of each layer.")]
_Pp = Annotated[int, typer.Option(min=1, max=1 << 16, help="Pipeline stages.")]
_Dtype = Annotated[
    str, typer.Option(help=f"How entries are stored: {', '.join((*DTYPE_NAMES, *PACKINGS))}.")
]
_ConvDtype = Annotated[
    str | None,
    typer.Option(help="How convolutions of linear attention are stored. Default: as --dtype."),
]
_TemporalDtype = Annotated[
    str | None,
    typer.Option(help="How temporal states of linear attention are stored. Default: fp32."),
]
_PageSize = Annotated[
    int | None,
    typer.Option(min=1, max=1 << 20, help="Tokens a page. Default: 64, deepseek_v4: 256."),
]
_Requests = Annotated[
    int,
    typer.Option(
        min=1,
        max=1 << 24,
        help="Requests whose windows, slots and rings are reserved before tokens are counted.",
    ),
]
_Tokens = Annotated[
    int, typer.Option(min=1, max=1 << 30, help="Length of the requests that are counted.")
]
_Draft = Annotated[
    bool,
    typer.Option(help="With the draft (MTP) layers, in the last stage, and rings for speculation."),
]
_BlockPool = Annotated[
    bool,
    typer.Option(
        "--block-pool", help="Pages, windows, slots and rings in blocks of one free list."
    ),
]
_AsJson = Annotated[bool, typer.Option("--json", help="One JSON object.")]


def budget(
    config: _Config,
    memory: _Memory = "H200",
    weights: _Weights = None,
    utilisation: _Utilisation = 1.0,
    tp: _Tp = 1,
    pp: _Pp = 1,
    dtype: _Dtype = "bf16",
    conv_dtype: _ConvDtype = None,
    temporal_dtype: _TemporalDtype = None,
    page_size: _PageSize = None,
    requests: _Requests = 1,
    tokens: _Tokens = 8192,
    draft: _Draft = False,
    block_pool: _BlockPool = False,
    as_json: _AsJson = False,
) -> None:
    """Print bytes per token by role, and what fits on each rank.

    State gets --memory times --utilisation, less --weights. Nothing is allocated.

    Exit status 1 if not even a page of tokens fits, 2 if the model cannot be declared or split so.

    JSON: `kvpool schema budget`.

    \b
    Example:
      kvpool budget llama_3_1_70b --memory 80GiB --tp 4 --weights 33GiB
    """
    linear = {"conv_dtype": conv_dtype, "temporal_dtype": temporal_dtype}
    try:
        options: dict[str, Any] = {"tp": tp, "pp": pp, "page_size": page_size}
        options |= {"requests": requests, "tokens": tokens, **storage(dtype)}
        options |= {"draft": draft_of(config) if draft else None, "utilisation": utilisation}
        options |= {name: _dtype(name, value) for name, value in linear.items() if value}
        options |= {"placement": "block"} if block_pool else {}
        fits = _figures(config, memory, weights, options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        typer.echo(json.dumps(as_dict(fits, dtype)))
        return
    from rich.console import Console

    console = Console()
    console.print(weights_words(fits), "", highlight=False, markup=False)
    console.print(share_table(fits, dtype), "", crop=False)
    console.print(stage_table(fits), crop=False)


def _figures(config: str, memory: str, weights: str | None, options: dict[str, Any]) -> Figures:
    """What fits. Raises ValueError; exits with status 1 if not even a page of tokens does."""
    from kvpool.models import declare
    from kvpool.models.sizing import DoesNotFit, figures

    nbytes, model = memory_of(memory), declare(config)
    counted_weights = weights_option(config, weights)
    try:
        return figures(model, nbytes, weights=counted_weights, **options)
    except DoesNotFit as error:
        without = " Or leave them out: --weights none." if counted_weights.total else ""
        fail(f"does not fit: {error}{without}")


def storage(dtype: str) -> dict[str, str]:
    """The pool's argument for a value of --dtype."""
    if dtype in PACKINGS:
        return {"packing": dtype}
    return {"dtype": _dtype("dtype", dtype, (*DTYPE_NAMES, *PACKINGS))}


def _dtype(option: str, name: str, choices: Collection[str] = DTYPE_NAMES) -> str:
    """The canonical name of a float dtype."""
    canonical = ALIASES.get(name, name)
    if canonical not in map(dtype_name, DTYPE_NAMES):
        raise ValueError(f"{option} {name!r}: one of {', '.join(choices)}.{nearest(name, choices)}")
    return canonical


def draft_of(config: str) -> Declaration:
    """The draft layers of a config that has some, for --draft. Raises ValueError."""
    from kvpool.models import declare_draft

    if (draft := declare_draft(config)) is None:
        raise ValueError(
            f"{config}: the config has no draft layers: nothing like num_nextn_predict_layers. "
            "Leave out --draft."
        )
    return draft


def as_dict(figures: Figures, dtype: str) -> dict[str, Any]:
    """Figures as the command prints them with --json; its help says what the keys mean."""
    by_tokens, by_requests = figures.tightest_for_tokens, figures.tightest_for_requests
    room = None if by_tokens is None else figures.stages[by_tokens].tokens
    weights = figures.weights
    own = {field.name: getattr(figures, field.name) for field in fields(figures)}
    return own | {
        "dtype": dtype,
        "weights": {"source": weights.source, "words": weights.words, "bytes": weights.total},
        "pp": len(figures.stages),
        "shares": [_share(share) for share in figures.shares],
        "stages": [_stage(stage) for stage in figures.stages],
        "tokens": {"stage": by_tokens, "count": room},
        "requests": {"stage": by_requests, "count": figures.stages[by_requests].requests},
    }


def _share(share: RoleBytes) -> dict[str, Any]:
    name = {"owner": share.owner, "role": share.role, "per": share.per}
    return {**name, "layers": share.layers, "bytes": _whole(share.nbytes)}


def _stage(stage: PipelineStage) -> dict[str, Any]:
    layers = {"layers": stage.layers, "draft_layers": stage.draft_layers}
    per = {f"bytes_per_{per}": _whole(stage.bytes_per(per)) for per in ("token", "request")}
    fits = {"bytes": stage.nbytes, "tokens": stage.tokens, "requests": stage.requests}
    sizes = {"weights": stage.weights, "state": stage.state}
    return {**layers, **sizes, **per, **dict.fromkeys(ITEM_COUNTS, 0), **stage.items, **fits}


def share_table(figures: Figures, dtype: str) -> Table:
    """Bytes by role: per token, then per request, independent of its length."""
    from rich.markup import escape

    from kvpool.render.table import FittedTable

    split = f"tp {figures.tp}, pp {len(figures.stages)}"
    table = FittedTable("role", title=f"{escape(figures.model)} in {escape(dtype)}, {split}")
    table.caption = "bytes of all stages, on one shard; windows for passes of one token"
    table.add_column("layers", justify="right")
    table.add_column("each")
    table.add_column("bytes", justify="right", no_wrap=True)
    for per in ("token", "request"):
        rows = [share for share in figures.shares if share.per == per]
        for share in rows:
            name = escape(f"{share.owner} {share.role}")
            table.add_row(name, str(len(share.layers)), per, _number(share.nbytes))
        if rows or per == "token":
            table.add_section()
            table.add_row("all", "", per, _number(sum(share.nbytes for share in rows)))
            table.add_section()
    return table


def stage_table(figures: Figures) -> Table:
    """What fits on a rank, by stage."""
    from kvpool.render.table import FittedTable

    title = f"{human(figures.memory)} a rank"
    if figures.utilisation != 1:
        title = f"{figures.utilisation:g} of {title}"
    title += f", pages of {figures.page_size} tokens"
    table = FittedTable("stage", "layers", title=title)
    counted_weights = any(stage.weights for stage in figures.stages)
    if counted_weights:
        table.add_column("weights", justify="right", no_wrap=True)
    per = [p for p in ("token", "request") if any(stage.bytes_per(p) for stage in figures.stages)]
    block = "block" if figures.block_pool else "page"
    for name in (*(f"bytes\na {p}" for p in per), f"{block}s", "tokens", "requests"):
        table.add_column(name, justify="right", no_wrap=True)
    for n, stage in enumerate(figures.stages):
        layers = ranges(stage.layers)
        if stage.draft_layers:
            layers += f", draft {ranges(stage.draft_layers)}"
        parts = (human(stage.weights),) if counted_weights else ()
        sizes = *parts, *(_number(stage.bytes_per(p)) for p in per), f"{stage.items['num_pages']:,}"
        table.add_row(str(n), layers, *sizes, _any(stage.tokens), f"{stage.requests:,}")
    reserved = counted(figures.reserved_requests, "request")
    caption = [
        f"tokens: in all, besides windows, slots and rings of {reserved}.",
        f"requests: at a time, of {figures.context_tokens:,} tokens each.",
        f"{block.title()} 0 is reserved.",
        f"Each row stands for {figures.tp} ranks." if figures.tp > 1 else "",
    ]
    by_tokens, by_requests = figures.tightest_for_tokens, figures.tightest_for_requests
    if len(figures.stages) > 1:
        table.add_section()
        room = None if by_tokens is None else figures.stages[by_tokens].tokens
        empty = [""] * (len(per) + 2 + counted_weights)
        table.add_row("all", *empty, _any(room), f"{figures.stages[by_requests].requests:,}")
        same = by_tokens in (None, by_requests)
        also = "" if same else f" for requests, {by_tokens} for tokens"
        caption.append(f"Tightest: stage {by_requests}{also}.")
    table.caption = " ".join(filter(None, caption))
    return table


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value


def _number(value: float) -> str:
    return f"{value:,.2f}".rstrip("0").rstrip(".")


def _any(tokens: int | None) -> str:
    return "any number" if tokens is None else f"{tokens:,}"
