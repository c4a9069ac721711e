"""`kvpool pair`: whether two engines can work together, by their contracts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from disagg.cli.explain import as_dict, print_plans

if TYPE_CHECKING:
    from disagg.contract.contract import Contract
    from disagg.contract.fit import Objection

_SOURCE = "file, or http://HOST:PORT of its port; of an engine's ranks several, with commas."
_Prefill = Annotated[str, typer.Argument(help=f"Prefill's contract: a {_SOURCE}")]
_Decode = Annotated[str, typer.Argument(help=f"Decode's contract: a {_SOURCE}")]
_Tokens = Annotated[int, typer.Option(min=1, max=1 << 24, help="Length of the request.")]
_Link = Annotated[
    str | None, typer.Option(help="Time on the wire, if each rank has such a link: 400Gb, 50GB.")
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def pair(
    prefill: _Prefill,
    decode: _Decode,
    tokens: _Tokens = 2048,
    link: _Link = None,
    as_json: _AsJson = False,
) -> None:
    """Say whether two engines can work together, and all reasons against.

    Contracts are compared as the engines' endpoints would do it: sides, protocol, transfer engine,
    what bytes mean, and the layouts of all ranks. An engine serves its contract where its setting
    "contract" says so; `curl http://HOST:PORT/contract` saves one.

    Exit status 1 if they cannot work together, or a contract cannot be read. If they can, what
    travels is printed as `kvpool explain` does.

    JSON: pair, true or false; prefill and decode (versions, engine, protocol, serves, size and
    labels of each contract that can be read); refused (about, prefill, decode, reason); explained,
    as `kvpool explain` prints it, of the layouts alone.

    \b
    Examples:
      kvpool pair http://10.0.0.1:9400 http://10.0.0.2:9400
      kvpool pair prefill.json http://10.0.0.2:9400 --link 100Gb
    """
    from disagg.cli.sides import parse_link
    from disagg.cli.wire import LinkRates
    from disagg.contract.fit import Fit

    try:
        rates = LinkRates(None if link is None else parse_link(link))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    contracts, objections = read_contracts(prefill, decode)
    fit = None
    if not objections:
        fit = Fit(**contracts, names=(prefill, decode), tokens=tokens)
        objections = fit.objections()
    if as_json:
        document = {
            "pair": not objections,
            **{side: summary(contract) for side, contract in contracts.items()},
            "refused": [asdict(objection) for objection in objections],
            "explained": fit and as_dict(fit.hand_off, rates),
        }
        typer.echo(json.dumps(document))
    else:
        print_outcome(contracts, objections)
        if fit is not None and not objections:
            print_plans(fit.hand_off, rates)
    if objections:
        raise typer.Exit(1)


def read_contracts(prefill: str, decode: str) -> tuple[dict[str, Contract], list[Objection]]:
    """Contracts by side, and what keeps any from being read."""
    from disagg.contract.client import read_contract
    from disagg.contract.fit import Objection

    contracts, objections = dict[str, "Contract"](), list[Objection]()
    for side, source in (("prefill", prefill), ("decode", decode)):
        try:
            contracts[side] = read_contract(source)
        except ValueError as error:
            objections.append(
                Objection(about="contract", prefill=prefill, decode=decode, reason=str(error))
            )
    return contracts, objections


def print_outcome(contracts: Mapping[str, Contract], objections: Sequence[Objection]) -> None:
    """Yes or no, the engines, and every reason against."""
    count = f"{len(objections)} reason{'s' if len(objections) > 1 else ''}"
    typer.echo(f"no, for {count}" if objections else "yes")
    for side, contract in contracts.items():
        versions = [f"{name} {number}" for name, number in contract.versions.items()]
        typer.echo(f"{side}: {', '.join(versions)}, engine {contract.engine}")
    for objection in objections:
        typer.echo(f"refused: {objection.prefill} -> {objection.decode}: {objection.reason}")


def summary(contract: Contract) -> dict[str, object]:
    """A contract in JSON, without its layouts."""
    from disagg.contract.labelling import labels

    return {
        "versions": dict(contract.versions),
        "engine": contract.engine,
        "protocol": contract.protocol,
        "serves": [*contract.serves],
        "size": contract.size,
        "labels": labels(contract),
    }
