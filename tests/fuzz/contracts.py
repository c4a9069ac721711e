"""Contracts as anybody may write them to a file, or serve them."""

from __future__ import annotations

from collections.abc import Iterator

from disagg.contract.contract import Contract, ContractRank
from disagg.contract.fit import Fit
from disagg.contract.labelling import MAX_VALUE, labels
from kvpool.layout import PoolLayout
from tests.fuzz import samples
from tests.fuzz.guard import Finding


def of(layouts: list[PoolLayout]) -> Contract:
    said = {"model": "m", "theta": 1.5, "vocab": 7}
    return Contract(
        engine="local",
        serves=("prefill", "decode"),
        size=len(layouts),
        ranks=tuple(
            ContractRank.of(n, layout, said, "tcp://h:1") for n, layout in enumerate(layouts)
        ),
        allow_missing=("draft",),
        versions={"kvpool": "1"},
    )


OWN = of([samples.CASES[0].own])


def run(data: bytes) -> str:
    """A contract or a ValueError; what was read is the same after a round trip, and is compared
    with our own, as either side.
    """
    try:
        contract = Contract.from_json(data)
    except ValueError:
        return "refused"
    if Contract.from_json(contract.to_json()) != contract:
        raise Finding("it changes in a round trip.")
    for name, value in labels(contract).items():
        if len(value) > MAX_VALUE or not value.isascii() or not name.isascii():
            raise Finding(f"label {name}: {value!r}.")
    for prefill, decode in ((OWN, contract), (contract, OWN)):
        fit = Fit(prefill=prefill, decode=decode, names=("a", "b"), tokens=samples.TOKENS)
        for objection in fit.objections():
            if not objection.reason.isprintable():
                raise Finding(f"{objection.reason!r} is not printable.")
    return "read"


def seeds() -> Iterator[bytes]:
    """Of one rank each, and of two."""
    for layout in samples.LAYOUTS:
        yield of([layout]).to_json().encode()
    yield of([samples.heads(4, 0, 0, 4), samples.heads(8, 0, 4, 4)]).to_json().encode()
