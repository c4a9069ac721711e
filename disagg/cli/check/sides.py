"""The two parts of `kvpool check`, from what the command line says to what is printed."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import typer

from disagg.cli.check.checking import UNABLE, Check, PrefillOpener
from disagg.cli.check.offer import CheckOffers, addresses_of
from disagg.cli.check.served import place_here, served
from disagg.cli.check.transport import UsedTransport, transport_of, watched_ucx
from disagg.cli.pair import print_outcome, read_contracts, summary
from disagg.connectors.settings import Settings
from disagg.contract.client import read_contract
from disagg.contract.contract import Contract
from disagg.contract.fit import Fit, Objection
from kvpool.cli.output import fail

GIB = 1 << 30
TOKENS = 2048
"""Of the request for which layouts are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Options of the command that both parts have."""

    settings: str
    nbytes: int
    timeout: float
    device: str | None
    as_json: bool

    def read(self, contract: Contract) -> Settings:
        """The settings, JSON or a file; its engine is the contract's where they name none. Raises
        typer.BadParameter.
        """
        try:
            text = Path(self.settings).read_text() if os.path.isfile(self.settings) else None
            values = json.loads(self.settings if text is None else text)
            if not isinstance(values, dict):
                raise ValueError('a JSON object, such as {"keys": "/etc/kvpool"}.')
            return Settings.read({"engine": contract.engine, **values}, "--settings")
        except (OSError, ValueError) as error:
            reason = str(error).removeprefix("--settings: ")
            raise typer.BadParameter(f"--settings: {reason}") from None


def offer(prefill: str, place: str, terms: Terms) -> None:
    """Prefill's part: serves until its time is over, Ctrl-C or SIGTERM."""
    try:
        contract = read_contract(prefill)
        if contract.missing:
            raise ValueError(f"{prefill}: ranks {contract.missing} are not in its contract.")
        settings = terms.read(contract)
        offers = CheckOffers(contract, settings, addresses_of(place, contract.size), terms.device)
    except (*UNABLE, OSError, ValueError) as error:
        fail(f"nothing is served: {error}")
    with offers:
        if terms.as_json:
            facts = {"engine": settings.engine, "tokens": offers.tokens}
            typer.echo(json.dumps({"serves": offers.addresses, **facts}))
        else:
            typer.echo(
                f"serves requests of at most {offers.tokens} tokens by engine {settings.engine}, "
                f"for {terms.timeout:g} s. On decode's host:\n"
                f"  kvpool check PREFILL DECODE --from {','.join(offers.addresses)}"
            )
        with suppress(KeyboardInterrupt):
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            offers.serve(terms.timeout)


def compare(prefill: str, decode: str, place: str | None, terms: Terms) -> None:
    """Decode's part, with what came of it."""
    contracts, objections = read_contracts(prefill, decode)
    if objections:
        _tell(contracts, objections, None, None, terms.as_json)
        raise typer.Exit(1)
    settings = terms.read(contracts["decode"])
    check = Check(
        fit=Fit(**contracts, names=(prefill, decode), tokens=TOKENS),
        settings=settings,
        source=_source(prefill, contracts["prefill"], place, settings, terms),
        nbytes=terms.nbytes,
        timeout=terms.timeout,
        device=terms.device,
    )
    with tempfile.TemporaryDirectory(prefix="kvpool-check-") as folder:
        with watched_ucx(Path(folder)):
            _run(check)
        transport = transport_of(settings, Path(folder)) if check.moved else None
    _tell(contracts, check.objections, check, transport, terms.as_json)
    if check.objections:
        raise typer.Exit(1)


def _source(
    prefill: str, contract: Contract, place: str | None, settings: Settings, terms: Terms
) -> PrefillOpener | None:
    """Prefill's part of the check: the one that `--from` names, or one of this check's own if
    prefill is on this host.
    """
    if place is None:
        if (place := place_here(contract, settings)) is None:
            return None
        arguments = [prefill, "--serve", place, "--settings", terms.settings]
        arguments += ["--device", terms.device] if terms.device is not None else []
        return partial(served, arguments, timeout=terms.timeout)
    try:
        addresses = addresses_of(place, contract.size)
    except ValueError as error:
        raise typer.BadParameter(f"--from: {error}") from None
    return lambda: nullcontext(addresses)


def _run(check: Check) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    console = Console(stderr=True)
    columns = BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=check.nbytes)
        check.run(lambda nbytes: progress.update(task, completed=nbytes))


def _tell(
    contracts: Mapping[str, Contract],
    objections: Sequence[Objection],
    check: Check | None,
    transport: UsedTransport | None,
    as_json: bool,
) -> None:
    if as_json:
        document: dict[str, Any] = {"check": not objections}
        document |= {side: summary(contract) for side, contract in contracts.items()}
        document["refused"] = [asdict(objection) for objection in objections]
        document["handshake"] = check.greeted if check else []
        moved = check.moved if check else None
        document["moved"] = moved and {**asdict(moved), "gib_per_second": moved.rate / GIB}
        document["transport"] = transport and asdict(transport)
        document["unchecked"] = check.unchecked if check else []
        typer.echo(json.dumps(document))
        return
    print_outcome(contracts, objections)
    if check is None:
        return
    if check.greeted:
        typer.echo(f"handshake: {', '.join(check.greeted)}")
    if check.moved and transport:
        moved = check.moved
        short = "" if moved.complete else ", when the time was over"
        typer.echo(
            f"moved: {moved.bytes:,} bytes in {moved.seconds:.3g} s{short}: "
            f"{moved.rate / GIB:.3g} GiB/s, equal by checksum"
        )
        typer.echo(f"bytes by: engine {transport.engine}, {transport.bytes}")
        typer.echo(f"messages by: {transport.messages}")
    for sentence in check.unchecked:
        typer.echo(f"not checked: {sentence}")
