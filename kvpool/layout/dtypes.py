"""Element types by name, so that a layout can be read without torch."""

from __future__ import annotations

ITEMSIZE = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
}

PACKINGS = ("fp8", "mxfp8")
"""Quantised packings: values of `float8_e4m3fn` with scales."""

ALIASES = {
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "ue8m0": "float8_e8m0fnu",
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
}


def dtype_name(dtype: object) -> str:
    """Canonical name of a dtype given as a torch dtype, a name or a short name (`"bf16"`)."""
    name = str(dtype).removeprefix("torch.")
    name = ALIASES.get(name, name)
    if name not in ITEMSIZE:
        names = ", ".join(sorted([*ITEMSIZE, *ALIASES]))
        raise ValueError(f"dtype {dtype!r} is not known. Known: {names}.")
    return name
