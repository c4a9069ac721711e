"""`kvpool store`: what stores hold, and a place for one."""

from __future__ import annotations

import typer

from disagg.cli.store.check import check
from disagg.cli.store.explain import explain
from disagg.cli.store.gc import gc
from disagg.cli.store.ls import ls
from disagg.cli.store.serve import serve
from disagg.cli.store.show import show

store = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
for command in (ls, show, check, explain, gc, serve):
    store.command()(command)


@store.callback()
def _about() -> None:
    """What stores hold, and a place for one.

    A store's URL: file:///path (one host, or a shared file system), s3://bucket/prefix,
    gs://bucket/prefix, az://container/prefix, mooncake://host:port, memory://name (one process).

    With --json a command prints one JSON value on standard output, and nothing else there.

    \b
    Example:
      kvpool store ls file:///cache
      kvpool store serve --memory 64GiB
    """
