"""What an engine's constructor takes by name, and a user gives it: checked by its annotations."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, Union, get_args, get_origin

import msgspec

from kvpool.layout.text import nearest

WORDS = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def check_engine_options(
    name: str, constructor: Callable[..., Any], options: Mapping[str, Any]
) -> None:
    """Raises ValueError for an option that engine `name` does not have, with those that it has, and
    for a value of another type than its annotation.
    """
    parameters = _parameters(constructor)
    # of an engine that hands on what it does not know
    others = [p.annotation for p in parameters if p.kind is p.VAR_KEYWORD]
    kinds = {p.name: p.annotation for p in parameters if p.kind is not p.VAR_KEYWORD}
    for option, value in options.items():
        if option not in kinds and not others:
            names = ", ".join(kinds) or "none"
            raise ValueError(
                f"engine {name} has no option {option!r}; there are {names}."
                f"{nearest(option, kinds)}"
            )
        kind = kinds[option] if option in kinds else others[0]
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError:
            raise ValueError(f"engine {name}: {option}={value!r}: {_words(kind)}.") from None
        except TypeError:  # no type of a document: a value that only code can give
            continue


def _parameters(constructor: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        signature = inspect.signature(constructor, eval_str=True)
    except NameError:  # of an engine whose annotations only type checkers can read
        return [
            parameter.replace(annotation=Any)
            for parameter in inspect.signature(constructor).parameters.values()
        ]
    return [
        parameter.replace(annotation=Any) if parameter.annotation is parameter.empty else parameter
        for parameter in signature.parameters.values()
    ]


def _words(kind: Any) -> str:
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return " or ".join(WORDS.get(kind, str(kind)) for kind in kinds)
