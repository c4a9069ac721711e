"""`kvpool budget`: bytes of a model's state, and what fits into memory, from its config."""

from __future__ import annotations

import json
from importlib import resources
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpool.layout.dtypes import PACKINGS
from kvpool.layout.sentences import nearest, ranges
from kvpool.pools.budget import counted
from kvpool.pools.placement import ITEM_COUNTS
from kvpool.render.text import human

if TYPE_CHECKING:
    from rich.table import Table

    from kvpool.models import Declaration
    from kvpool.models.sizing import Figures, RoleBytes

DTYPE_NAMES = {"bf16": "bf16", "fp16": "f16", "fp32": "f32", "e4m3": "e4m3", "e5m2": "e5m2"}
STORED = ", ".join((*DTYPE_NAMES, *PACKINGS))


def model_names() -> list[str]:
    """The shipped configs, for shell completion: `kvpool.models.shipped` would import torch."""
    configs = resources.files("kvpool") / "models" / "configs"
    return sorted(path.name.removesuffix(".json") for path in configs.iterdir())


def budget(
    config: Annotated[
        str,
        typer.Argument(
            help="A config.json, a directory that holds one, or the name of a shipped config, "
            "such as deepseek_v32.",
            autocompletion=model_names,
        ),
    ],
    memory: Annotated[
        str, typer.Option(help="Memory of each rank: 141GiB, 80GB, or bytes (1048576 or more).")
    ] = "141GiB",
    weights: Annotated[
        str | None,
        typer.Option(help="Weights on each rank, as --memory. Default: they are not counted."),
    ] = None,
    utilisation: Annotated[
        float,
        typer.Option(
            help="Fraction of the memory for weights and state; activations have the rest."
        ),
    ] = 1.0,
    tp: Annotated[int, typer.Option(min=1, max=1 << 16, help="Shards of each layer.")] = 1,
    pp: Annotated[int, typer.Option(min=1, max=1 << 16, help="Pipeline stages.")] = 1,
    dtype: Annotated[str, typer.Option(help=f"How entries are stored: {STORED}.")] = "bf16",
    conv_dtype: Annotated[
        str | None,
        typer.Option(help="How convolutions of linear attention are stored. Default: as --dtype."),
    ] = None,
    temporal_dtype: Annotated[
        str | None,
        typer.Option(help="How temporal states of linear attention are stored. Default: fp32."),
    ] = None,
    page_size: Annotated[
        int | None,
        typer.Option(min=1, max=1 << 20, help="Tokens a page. Default: 64, deepseek_v4: 256."),
    ] = None,
    requests: Annotated[
        int,
        typer.Option(
            min=1,
            max=1 << 24,
            help="Requests whose windows, slots and rings are reserved before tokens are counted.",
        ),
    ] = 1,
    tokens: Annotated[
        int,
        typer.Option(min=1, max=1 << 30, help="Length of the requests that are counted."),
    ] = 8192,
    draft: Annotated[
        bool,
        typer.Option(
            help="With the draft (MTP) layers, in the last stage, and rings for speculation."
        ),
    ] = False,
    block_pool: Annotated[
        bool,
        typer.Option(
            "--block-pool", help="Pages, windows, slots and rings in blocks of one free list."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Print bytes per token by role, and what fits on each rank.

    State gets --memory times --utilisation, less --weights: weights are counted only where you
    give them. Nothing is allocated.

    Exit status 1 if not even a page of tokens fits, 2 if the model cannot be declared or split so.

    JSON: model, dtype, memory, weights, utilisation, state (bytes for state), tp, pp, page_size,
    block_pool, reserved_requests, context_tokens; shares (owner, role, per token or request,
    layers, bytes: over all stages, one shard of each); stages (layers, draft_layers,
    bytes_per_token, bytes_per_request, num_pages, num_window_pages, num_slots as constructor
    arguments, bytes in all, tokens, requests); tokens and requests that fit in the tightest stage
    (stage, count). tokens is null where no buffer grows with tokens.

    \b
    Example:
      kvpool budget llama_3_1_70b --memory 80GiB --tp 4 --weights 33GiB
    """
    from kvpool.models import declare
    from kvpool.models.sizing import DoesNotFit, figures, parse_memory

    try:
        options: dict[str, Any] = {"tp": tp, "pp": pp, "page_size": page_size}
        options |= {"requests": requests, "tokens": tokens, **storage(dtype)}
        options |= {"draft": draft_of(config) if draft else None}
        options |= {
            "utilisation": utilisation,
            "weights": parse_memory(weights, "weights") if weights else 0,
        }
        linear = {"conv_dtype": conv_dtype, "temporal_dtype": temporal_dtype}
        options |= {name: _float(name, value) for name, value in linear.items() if value}
        options |= {"placement": "block"} if block_pool else {}
        found = figures(declare(config), parse_memory(memory), **options)
    except DoesNotFit as error:
        typer.echo(f"does not fit: {error}", err=True)
        raise typer.Exit(1) from None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        typer.echo(json.dumps(as_dict(found, dtype)))
        return
    from rich.console import Console

    console = Console()
    console.print(share_table(found, dtype), "", crop=False)
    console.print(stage_table(found), crop=False)


def storage(dtype: str) -> dict[str, str]:
    """The pool's argument for a value of --dtype."""
    if dtype in PACKINGS:
        return {"packing": dtype}
    if dtype not in DTYPE_NAMES:
        known = (*DTYPE_NAMES, *PACKINGS)
        raise ValueError(f"dtype {dtype!r}: one of {STORED}.{nearest(dtype, known)}")
    return {"dtype": DTYPE_NAMES[dtype]}


def draft_of(config: str) -> Declaration:
    """The draft layers of a config that has some, for --draft. Raises ValueError."""
    from kvpool.models import declare_draft

    if (found := declare_draft(config)) is None:
        raise ValueError(f"{config}: the config has no draft layers. Leave out --draft.")
    return found


def _float(name: str, value: str) -> str:
    """A float dtype of an option."""
    if value not in DTYPE_NAMES:
        known = ", ".join(DTYPE_NAMES)
        raise ValueError(f"{name} {value!r}: one of {known}.{nearest(value, DTYPE_NAMES)}")
    return DTYPE_NAMES[value]


def as_dict(found: Figures, dtype: str) -> dict[str, Any]:
    """Figures as the command prints them with --json; its help says what the keys mean."""
    stages = []
    for stage in found.stages:
        counts = dict.fromkeys(ITEM_COUNTS, 0) | stage.items
        held = {"layers": list(stage.layers), "draft_layers": list(stage.draft_layers)}
        per = {f"bytes_per_{per}": _whole(stage.bytes_per(per)) for per in ("token", "request")}
        fits = {"bytes": stage.nbytes, "tokens": stage.tokens, "requests": stage.requests}
        stages.append({**held, **per, **counts, **fits})
    by_tokens, by_requests = found.tightest_for_tokens, found.tightest_for_requests
    room = None if by_tokens is None else found.stages[by_tokens].tokens
    return {
        "model": found.model,
        "dtype": dtype,
        "memory": found.memory,
        "weights": found.weights,
        "utilisation": found.utilisation,
        "state": found.state,
        "tp": found.tp,
        "pp": len(found.stages),
        "page_size": found.page_size,
        "block_pool": found.block_pool,
        "reserved_requests": found.reserved_requests,
        "context_tokens": found.context_tokens,
        "shares": [_share(share) for share in found.shares],
        "stages": stages,
        "tokens": {"stage": by_tokens, "count": room},
        "requests": {"stage": by_requests, "count": found.stages[by_requests].requests},
    }


def share_table(found: Figures, dtype: str) -> Table:
    """Bytes by role: per token, then per request, independent of its length."""
    from rich.markup import escape

    from kvpool.render.table import FittedTable

    split = f"tp {found.tp}, pp {len(found.stages)}"
    table = FittedTable(title=f"{escape(found.model)} in {escape(dtype)}, {split}")
    table.caption = "bytes of all stages, on one shard"
    table.add_column("role")
    table.add_column("layers", justify="right")
    table.add_column("each")
    table.add_column("bytes", justify="right", no_wrap=True)
    for per in ("token", "request"):
        rows = [share for share in found.shares if share.per == per]
        for share in rows:
            name = escape(f"{share.owner} {share.role}")
            table.add_row(name, str(len(share.layers)), per, _number(share.nbytes))
        if rows or per == "token":
            table.add_section()
            table.add_row("all", "", per, _number(sum(share.nbytes for share in rows)))
            table.add_section()
    return table


def stage_table(found: Figures) -> Table:
    """What fits on a rank, by stage."""
    from kvpool.render.table import FittedTable

    title = f"{human(found.memory)} a rank, pages of {found.page_size} tokens"
    if found.state != found.memory:
        of = f"{found.utilisation:g} of {human(found.memory)} a rank"
        less = f" less {human(found.weights)} of weights" if found.weights else ""
        title = f"{human(found.state)} ({of}{less}), pages of {found.page_size} tokens"
    table = FittedTable(title=title)
    per = [p for p in ("token", "request") if any(stage.bytes_per(p) for stage in found.stages)]
    table.add_column("stage")
    table.add_column("layers")
    pages = "blocks" if found.block_pool else "pages"
    for name in (*(f"bytes\na {p}" for p in per), pages, "tokens", "requests"):
        table.add_column(name, justify="right", no_wrap=True)
    for n, stage in enumerate(found.stages):
        layers = ranges(stage.layers)
        if stage.draft_layers:
            layers += f", draft {ranges(stage.draft_layers)}"
        sizes = *(_number(stage.bytes_per(p)) for p in per), f"{stage.items['num_pages']:,}"
        table.add_row(str(n), layers, *sizes, _any(stage.tokens), f"{stage.requests:,}")
    by_tokens, by_requests = found.tightest_for_tokens, found.tightest_for_requests
    if len(found.stages) > 1:
        table.add_section()
        room = None if by_tokens is None else found.stages[by_tokens].tokens
        empty = [""] * (len(per) + 2)
        table.add_row("all", *empty, _any(room), f"{found.stages[by_requests].requests:,}")
    table.caption = _caption(found)
    return table


def _caption(found: Figures) -> str:
    text = "" if found.weights else "Weights are not counted: give them as --weights. "
    text += (
        f"tokens: in all, besides windows, slots and rings of {counted(found.reserved_requests)}. "
        f"requests: at a time, of {found.context_tokens:,} tokens each. "
        f"{'Block' if found.block_pool else 'Page'} 0 is reserved."
    )
    if found.tp > 1:
        text += f" Each row stands for {found.tp} ranks."
    by_tokens, by_requests = found.tightest_for_tokens, found.tightest_for_requests
    if len(found.stages) > 1:
        same = by_tokens in (None, by_requests)
        also = "." if same else f" for requests, {by_tokens} for tokens."
        text += f" Tightest: stage {by_requests}{also}"
    return text


def _share(share: RoleBytes) -> dict[str, Any]:
    held = {"owner": share.owner, "role": share.role, "per": share.per}
    return {**held, "layers": list(share.layers), "bytes": _whole(share.nbytes)}


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value


def _number(value: float) -> str:
    text = f"{value:,.2f}"
    return text.removesuffix("0").removesuffix("0").removesuffix(".")


def _any(tokens: int | None) -> str:
    return "any number" if tokens is None else f"{tokens:,}"
