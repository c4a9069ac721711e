"""Element types by name, so that a layout can be read without torch."""

from __future__ import annotations

_BY_SIZE = {
    1: "bool uint8 int8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu "
    "float4_e2m1fn_x2",
    2: "int16 uint16 float16 bfloat16",
    4: "int32 uint32 float32",
    8: "int64 uint64 float64",
}
ITEMSIZE = {name: size for size, names in _BY_SIZE.items() for name in names.split()}
"""Bytes of an element, by the name of its type."""

PACKINGS = ("fp8", "mxfp8")
"""Quantised packings: values of `float8_e4m3fn` with scales."""

READ_AS = ("bfloat16", "float16", "float32", "float64")
"""What a pool with a quantised packing takes and returns."""

ALIASES = {
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "ue8m0": "float8_e8m0fnu",
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "fp16": "float16",
    "fp32": "float32",
}


def dtype_name(dtype: object) -> str:
    """Canonical name of a dtype given as a torch dtype, a name or a short name (`"bf16"`)."""
    name = str(dtype).removeprefix("torch.")
    name = ALIASES.get(name, name)
    if name not in ITEMSIZE:
        names = ", ".join(sorted([*ITEMSIZE, *ALIASES]))
        packing = f" It is a packing: packing={name!r}." if name in PACKINGS else ""
        raise ValueError(f"dtype {dtype!r} is not known. Known: {names}.{packing}")
    return name


def storage(dtype: object, packing: object, owner: str) -> tuple[str, str]:
    """The names of a pool's dtype, in which values are written and read, and of its packing, each
    given as `dtype_name` takes it, or None. Raises ValueError if they contradict each other.
    """
    if packing in PACKINGS:
        read = dtype_name("bf16" if dtype is None else dtype)
        if read not in READ_AS:
            raise ValueError(
                f"{owner}: dtype {read}, packing {packing!r}. A quantised pool takes and returns "
                f"floats: use one of {', '.join(READ_AS)} as dtype."
            )
        return read, str(packing)
    if packing is None and dtype is None:
        raise ValueError(f"{owner}: a dtype or a packing must be given.")
    stored = dtype_name(dtype if packing is None else packing)
    if dtype is not None and dtype_name(dtype) != stored:
        raise ValueError(
            f"{owner}: dtype {dtype_name(dtype)}, packing {stored}. Values are stored without "
            "rounding: give only one of the two."
        )
    return stored, stored
