"""How rows are stored, from the formats' documents: IEEE 754 (binary32, binary16), bfloat16 (its
upper half), OCP 8-bit floating point (E4M3), OCP Microscaling (E8M0). Nothing here is kvpool's.
"""

from __future__ import annotations

import numpy as np

SMALLEST_SCALE = np.float32(2.0**-126)
LARGEST = {"float8_e4m3fn": np.float32(448), "int8": np.float32(127)}


def _e4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    return mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)


E4M3 = np.array([_e4m3(code) for code in range(127)])
"""The values of positive codes, which ascend; 127 is no number."""


def to_e4m3(values: np.ndarray) -> np.ndarray:
    """The nearest codes, of two as near the even one."""
    size = np.abs(values.astype(np.float64))
    above = np.clip(np.searchsorted(E4M3, size), 1, 126)
    low, high = E4M3[above - 1], E4M3[above]
    nearer = np.where(size - low < high - size, above - 1, above)
    tie = size - low == high - size
    codes = np.where(tie, above - (above & 1), nearer).astype(np.uint8)
    return codes | (np.signbit(values).astype(np.uint8) << 7)


def of_e4m3(codes: np.ndarray) -> np.ndarray:
    return np.where(codes & 0x80, -1.0, 1.0).astype(np.float32) * E4M3[codes & 0x7F].astype(
        np.float32
    )


def to_floats(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values, rounded to the nearest, as the bytes of that type `[..., D, bytes]`."""
    if dtype == "float32":
        stored = values.astype("<f4")
    elif dtype == "float16":
        stored = values.astype("<f2")
    else:
        bits = values.astype("<f4").view("<u4").astype(np.uint64)
        stored = ((bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)).astype(
            "<u2"
        )
    return np.ascontiguousarray(stored)[..., None].view(np.uint8)


def of_floats(stored: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values of bytes `[..., D, bytes]`."""
    flat = np.ascontiguousarray(stored)
    if dtype == "float32":
        return flat.view("<f4")[..., 0]
    if dtype == "float16":
        return flat.view("<f2")[..., 0].astype(np.float32)
    return (flat.view("<u2")[..., 0].astype("<u4") << 16).view("<f4")


def to_scale(factors: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of scales, and the factors that values are divided by."""
    if dtype != "float8_e8m0fnu":
        return to_floats(factors, dtype), factors
    mantissa, exponent = np.frexp(factors)
    exponent = exponent - (mantissa == 0.5)
    return (exponent + 127).astype(np.uint8)[..., None], np.ldexp(np.float32(1), exponent)


def encode(
    values: np.ndarray, dtype: str, scale: str = "", scales: int = 0
) -> tuple[np.ndarray, np.ndarray | None]:
    """Rows `[..., D]` of float32 as bytes `[..., D, bytes]`, and scales as `[..., S, bytes]`."""
    values = values.astype(np.float32)
    if not scales:
        stored = (
            to_e4m3(values)[..., None] if dtype == "float8_e4m3fn" else to_floats(values, dtype)
        )
        return stored, None
    blocks = values.reshape(*values.shape[:-1], scales, -1)
    factors = np.abs(blocks).max(axis=-1) / LARGEST[dtype]
    stored, factors = to_scale(np.maximum(factors.astype(np.float32), SMALLEST_SCALE), scale)
    quotients = (blocks / factors[..., None]).astype(np.float32)
    if dtype == "int8":
        codes = np.rint(quotients).astype(np.int8).view(np.uint8)
    else:
        codes = to_e4m3(quotients)
    return codes.reshape(*values.shape, 1), stored


def decode(
    stored: np.ndarray, dtype: str, scales: np.ndarray | None = None, scale: str = ""
) -> np.ndarray:
    """float32 rows of what `encode` returns."""
    codes = stored[..., 0]
    if scales is None:
        return of_e4m3(codes) if dtype == "float8_e4m3fn" else of_floats(stored, dtype)
    values = codes.view(np.int8).astype(np.float32) if dtype == "int8" else of_e4m3(codes)
    if scale == "float8_e8m0fnu":
        factors = np.ldexp(np.float32(1), scales[..., 0].astype(np.int32) - 127)
    else:
        factors = of_floats(scales, scale)
    blocks = values.reshape(*factors.shape, -1) * factors[..., None]
    return blocks.astype(np.float32).reshape(values.shape)
