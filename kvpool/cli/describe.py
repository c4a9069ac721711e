"""`kvpool describe`: a layout, or the pool of a model config, as a table, JSON or a picture."""

from __future__ import annotations

from os.path import isfile
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpool.cli import check_output, write_output
from kvpool.cli.budget import draft_of, model_names, storage
from kvpool.layout import PoolLayout
from kvpool.layout.codec import read_file
from kvpool.render.html import html as map_page
from kvpool.render.svg import svg as map_svg
from kvpool.render.text import layout_table, space_words

DTYPE_HELP = "How entries are stored: bf16, fp16, fp32, ..., or fp8, mxfp8. Default: bf16."

_What = Annotated[
    str,
    typer.Argument(
        help="File of PoolLayout.to_json or to_msgpack; or a model's config.json, a directory "
        "holding one, or the name of a shipped config.",
        autocompletion=model_names,
    ),
]
_Dtype = Annotated[str | None, typer.Option("--dtype", "--packing", help=DTYPE_HELP)]
_PageSize = Annotated[
    int | None, typer.Option(min=1, max=1 << 20, help="Tokens a page. Default: the model's.")
]
_Tp = Annotated[
    int | None, typer.Option(min=1, max=1 << 16, help="Shards of each layer. Default: 1.")
]
_Rank = Annotated[int | None, typer.Option(min=0, max=1 << 16, help="Which of them. Default: 0.")]
_Items = Annotated[
    int | None,
    typer.Option(min=2, max=1 << 30, help="Pages, window pages and slots. Default: 1024."),
]
_Draft = Annotated[
    bool, typer.Option("--draft", help="The draft (MTP) layers too, and rings for speculation.")
]
_AsJson = Annotated[
    bool, typer.Option("--json", help="The layout as JSON, which `describe` and `explain` read.")
]
_Svg = Annotated[Path | None, typer.Option(help="Write a memory map of an item of each kind.")]
_Html = Annotated[Path | None, typer.Option(help="As --svg, as a page that looks up bytes.")]


def describe(
    what: _What,
    dtype: _Dtype = None,
    page_size: _PageSize = None,
    tp: _Tp = None,
    rank: _Rank = None,
    items: _Items = None,
    draft: _Draft = False,
    as_json: _AsJson = False,
    svg: _Svg = None,
    html: _Html = None,
) -> None:
    """Print the layout of a pool: regions, sizes, axes and strides.

    And how ids address items. The pool of a model config has sizes and no memory: bases count
    from 0.

    \b
    Example:
      kvpool describe deepseek_v4 --packing fp8 --html map.html
    """
    from rich.console import Console
    from rich.markup import escape

    for option, path in (("--svg", svg), ("--html", html)):
        check_output(option, path)
    options = {"--dtype": dtype, "--page-size": page_size, "--tp": tp, "--rank": rank}
    options |= {"--items": items, "--draft": draft or None}
    passed = {name: value for name, value in options.items() if value is not None}
    try:
        layout, title = read_file(what) if isfile(what) else None, Path(what).name
        if layout is None:
            layout, title = model_layout(what, passed)
        elif passed:
            raise ValueError(
                f"{what}: {', '.join(passed)} cannot change a layout file. Leave "
                f"{'them' if len(passed) > 1 else 'it'} out, or give a model config."
            )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    for option, path, draw in (("--svg", svg, map_svg), ("--html", html, map_page)):
        if path is not None:
            write_output(option, path, draw(layout, title))
    if as_json:
        typer.echo(layout.to_json())
    else:
        console = Console()
        console.print(layout_table(layout, escape(title)), crop=False)
        for space in layout.spaces:
            console.print(escape(space_words(space)), highlight=False)


def model_layout(config: str, options: dict[str, Any]) -> tuple[PoolLayout, str]:
    """The layout of a model's pool on one rank, and its title. `options` are the given options of
    the command. Raises ValueError where they do not fit.
    """
    from kvpool.layout.formats import Shard
    from kvpool.models import declare
    from kvpool.models.sizing import stage_pools
    from kvpool.pools.placement import ITEM_COUNTS

    dtype, tp = options.get("--dtype", "bf16"), options.get("--tp", 1)
    shard = Shard(options.get("--rank", 0), tp)
    common: dict[str, Any] = {"device": "meta", "shard": shard, **storage(dtype)}
    common |= dict.fromkeys(ITEM_COUNTS, options.get("--items", 1024))
    target = declare(config)
    common["page_size"] = options.get("--page-size", target.page_size)
    (pools,) = stage_pools(target, draft_of(config) if "--draft" in options else None, 1, **common)
    layout = PoolLayout.merge(*(pool.layout for pool in pools))
    words = [target.model, dtype, f"pages of {common['page_size']}"]
    return layout, ", ".join(words + [f"rank {shard.rank} of {tp}"] * (tp > 1))
