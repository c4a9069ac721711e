"""Number formats by their definitions, in numpy: numbers to bytes, and back.

Arrays of bytes are uint8 `[..., n * size]`, little-endian; arrays of numbers are float32 or float64
`[..., n]`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[Any]

LARGEST_CODE = {"float8_e4m3fn": np.float32(448), "int8": np.float32(127)}
MIN_SCALE = np.float32(2.0**-126)
MAX_FLOAT = {
    "float16": 65504.0,
    "bfloat16": float.fromhex("0x1.fep127"),
    "float32": float.fromhex("0x1.fffffep127"),
    "float64": np.inf,  # every float32 fits
}


def _e4m3_table() -> npt.NDArray[np.float64]:
    """OCP 8-bit floating point: 4 exponent bits with bias 7, 3 fraction bits, no infinities."""
    byte = np.arange(256)
    exponent, fraction = (byte >> 3) & 15, byte & 7
    normal = np.ldexp((8 + fraction).astype(float), exponent - 10)
    size = np.where(exponent == 0, np.ldexp(fraction.astype(float), -9), normal)
    size[byte & 0x7F == 0x7F] = np.nan
    signed: npt.NDArray[np.float64] = np.where(byte & 0x80, -size, size)
    return signed


E4M3 = _e4m3_table()
_STEPS = E4M3[:127]  # from 0 to 448
_TIES = (_STEPS[1:] + _STEPS[:-1]) / 2
_NUMBERS = {
    "float8_e4m3fn": E4M3.astype(np.float32),
    "float8_e8m0fnu": np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.float32(np.nan)),
    "int8": np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32),
}
"""Of each dtype of one byte, by byte."""
_NUMPY = {"float16": "<f2", "float32": "<f4", "float64": "<f8"}


def to_e4m3(numbers: Floats) -> Bytes:
    """The nearest e4m3, ties to even; numbers are at most 464 or NaN."""
    size = np.abs(numbers).astype(np.float64)
    low = np.searchsorted(_TIES, size, side="left")
    # exactly between two steps: the even one
    tie = (low < _TIES.size) & (size == _TIES[np.minimum(low, _TIES.size - 1)])
    byte = np.where(tie & (low % 2 == 1), low + 1, low)
    byte = np.where(np.isnan(size), 0x7F, byte)
    byte |= np.signbit(numbers) << 7
    return np.array(byte, dtype=np.uint8)


def encode(numbers: Floats, dtype: str) -> Bytes:
    """Numbers as bytes of a torch dtype, rounded to the nearest, ties to even."""
    if dtype == "float8_e4m3fn":
        return to_e4m3(numbers)
    if dtype == "bfloat16":
        whole = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32)
        rounded = whole + 0x7FFF + ((whole >> 16) & 1)
        rounded = np.where(np.isnan(numbers), np.uint32(0x7FC00000), rounded)
        return (rounded >> 16).astype("<u2").view(np.uint8)
    return np.ascontiguousarray(numbers, dtype=_NUMPY[dtype]).view(np.uint8)


def decode(raw: Bytes, dtype: str) -> Floats:
    """The numbers in bytes of a torch dtype."""
    if dtype in _NUMBERS:
        return _NUMBERS[dtype][raw]
    raw = np.ascontiguousarray(raw)
    if dtype == "bfloat16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return raw.view(_NUMPY[dtype])


def quantise(
    numbers: Floats, blocks: int, scale: str, code_dtype: str = "float8_e4m3fn"
) -> tuple[Bytes, Bytes]:
    """Bytes of `code_dtype` (e4m3 or int8) `[..., D]`, and scale bytes, one scale a block, of
    numbers `[..., D]`.

    A scale is the block's largest magnitude over 448 (int8: 127) in float32, at least 2**-126. The
    block is divided by it, and it is stored as `scale`; as ue8m0 it is rounded up to a power of two
    first (byte: exponent + 127). A block with an infinity or a NaN has a scale of NaN and values of
    NaN (int8: 0). A scale beyond float16 is stored as NaN.
    """
    cut = numbers.astype(np.float32).reshape(*numbers.shape[:-1], blocks, -1)
    with np.errstate(all="ignore"):
        largest = np.abs(cut).max(axis=-1, initial=0)
        factor = np.maximum(largest / LARGEST_CODE[code_dtype], MIN_SCALE)
        bad = ~np.isfinite(largest)
        if scale == "float8_e8m0fnu":
            bits = np.where(bad, np.float32(1), factor).astype(np.float32).view(np.uint32)
            byte = (bits >> 23) + ((bits & 0x7FFFFF) != 0)  # biased by 127 in both formats
            stored = np.where(bad, 255, byte).astype(np.uint8)
            factor = decode(stored, scale)
        else:
            factor = np.where(bad, np.float32(np.nan), factor).astype(np.float32)
            beyond = factor >= (65520.0 if scale == "float16" else np.inf)
            stored = encode(np.where(beyond, np.float32(np.nan), factor), scale)
        quotients = cut / factor[..., None]
        if code_dtype == "int8":
            codes = np.where(bad[..., None], 0, np.rint(quotients)).astype(np.int8).view(np.uint8)
        else:
            codes = to_e4m3(quotients)
    return codes.reshape(numbers.shape), stored


def dequantise(
    codes: Bytes, stored: Bytes, scale: str, dtype: str, code_dtype: str = "float8_e4m3fn"
) -> Bytes:
    """The floats of quantised values as bytes of `dtype`: float32 products, clipped."""
    factor = decode(stored, scale).astype(np.float32)
    block = codes.shape[-1] // factor.shape[-1]
    cut = decode(codes, code_dtype).reshape(*factor.shape, block)
    with np.errstate(all="ignore"):
        product = (cut * factor[..., None]).astype(np.float32)
        product = np.clip(product, -MAX_FLOAT[dtype], MAX_FLOAT[dtype]).astype(product.dtype)
    return encode(product.reshape(codes.shape), dtype)


def plain_floats(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Floats:
    """Numbers of many magnitudes that `dtype` represents exactly, as float32."""
    spread = random.uniform(-10, 10, (*shape[:-1], 1))
    return decode(encode(random.standard_normal(shape) * 2.0**spread, dtype), dtype).astype("f4")


def odd_floats(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Floats:
    """Hard cases: ties, zeros of both signs, tiny and huge numbers, infinities and NaN."""
    ties = np.resize(np.concatenate([_TIES, -_TIES, [448.0]]), shape[-1])
    most = np.finfo(np.float16).max if dtype == "float16" else 2.0**118
    rows = [
        ties,
        ties * 2.0**-8,
        np.resize([0.0, -0.0], shape[-1]),
        np.resize([448.0, -448.0, 1.0, 2.0**-9, 2.0**-10, 3 * 2.0**-11], shape[-1]),
        np.resize([448 * (1 + 2.0**-7), 1.0], shape[-1]),
        random.standard_normal(shape[-1]) * 2.0**-120,
        np.resize([2.0**-121, -(2.0**-123)], shape[-1]),  # of a scale below the smallest
        np.resize([most, -most, 1.0], shape[-1]),
        np.where(np.arange(shape[-1]) == shape[-1] // 2, np.inf, ties),
        np.where(np.arange(shape[-1]) == 0, np.nan, ties),
    ]
    picked = random.integers(0, len(rows), shape[:-1])
    if picked.size >= len(rows):
        picked.flat[: len(rows)] = np.arange(len(rows))
    picked_rows = np.stack(rows)[picked]
    with np.errstate(all="ignore"):
        return decode(encode(picked_rows, dtype), dtype).astype(np.float32)
