"""Compiles every kernel for an H200 with arguments as pools give them, where no GPU is needed, and
prints what each launch made of memory: {launch: {access: count}} as JSON.
"""

from __future__ import annotations

import json
import re
from collections import Counter

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from kvpool.device.torch_ops import ReadRow, WriteRow
from kvpool_cuda.copies import copy_items, copy_runs
from kvpool_cuda.rows import load_rows, store_rows
from tests.kvpool_cuda.devices import MEMORY

COUNT = 64
PAGES = 4
ACCESS = re.compile(r"\b((?:ld|st)\.global\.(?:v\d\.)?[bu]\d+|div\.\w+\.f32)\b")


class Hopper:
    """The target for triton's launcher, without a GPU."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def memory(nbytes):
    return torch.zeros(nbytes, dtype=torch.uint8)


def entries(dtype, page, first, *axes):
    """Entries of pages of `page` bytes, from byte `first`, with axes of (size, bytes)."""
    sizes, steps = zip(*axes)
    strides = [page // dtype.itemsize, *(step // dtype.itemsize for step in steps)]
    flat = memory(PAGES * page).view(dtype)
    return flat.as_strided([PAGES, *sizes], strides, first // dtype.itemsize)


def launches():
    bf16, e4m3, f32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
    where = torch.arange(COUNT)
    heads = torch.zeros(COUNT, 24, 128, dtype=bf16)  # query, key and value as a projection has them
    key, value = heads[:, 8:16], heads[:, 16:]
    nhd = entries(bf16, 64 * 2048, 0, (64, 2048), (8, 256), (128, 2))
    hnd = entries(bf16, 64 * 2048, 0, (64, 256), (8, 64 * 256), (128, 2))
    for name, view in (("k and v, nhd", nhd), ("k and v, hnd", hnd)):
        yield name, lambda v=view: store_rows([WriteRow(v, key), WriteRow(v, value)], where)
    yield "k and v, loaded", lambda: load_rows([ReadRow(hnd), ReadRow(hnd)], where)
    latent, rope = (torch.zeros(COUNT, dim, dtype=bf16) for dim in (512, 64))
    plain = entries(bf16, 64 * 1152, 0, (64, 1152), (512, 2))
    behind = entries(bf16, 64 * 1152, 1024, (64, 1152), (64, 2))
    yield "mla", lambda: store_rows([WriteRow(plain, latent), WriteRow(behind, rope)], where)
    packed = (
        entries(e4m3, 64 * 656, 0, (64, 656), (512, 1)),
        entries(f32, 64 * 656, 512, (64, 656), (4, 4)),
        entries(bf16, 64 * 656, 528, (64, 656), (64, 2)),
    )
    rows = [WriteRow(packed[0], latent, packed[1]), WriteRow(packed[2], rope)]
    yield "mla fp8", lambda: store_rows(rows, where)
    held = [ReadRow(*packed[:2], bf16), ReadRow(packed[2])]
    yield "mla fp8, loaded", lambda: load_rows(held, where)
    page = 37440
    v4 = (
        entries(e4m3, page, 0, (64, 576), (448, 1)),
        entries(torch.float8_e8m0fnu, page, 64 * 576, (64, 8), (7, 1)),
        entries(bf16, page, 448, (64, 576), (64, 2)),
    )
    v4_rows = [WriteRow(v4[0], latent[:, :448], v4[1]), WriteRow(v4[2], rope)]
    yield "dsv4 fp8", lambda: store_rows(v4_rows, where)
    keys = entries(torch.int8, 64 * 128, 0, (64, 128), (128, 1))
    halves = entries(torch.float16, 64 * 2, 0, (64, 2), (1, 2))
    yield "keys int8", lambda: store_rows([WriteRow(keys, latent[:, :128], halves)], where)
    yield "keys int8, loaded", lambda: load_rows([ReadRow(keys, halves, bf16)], where)
    ids = torch.arange(2)
    pages = memory(4 * page).view(4, page)
    yield "move", lambda: copy_items([pages], ids, ids + 2, True)
    yield "staged move", lambda: copy_items([pages], ids, ids + 1)
    at = pages.data_ptr() + np.array([3, 0, 2]) * 656
    for name, nbytes in (("runs of 656", 656), ("runs of 132", 132), ("runs of 131", 131)):
        sizes = np.full(3, nbytes)
        yield name, lambda n=sizes: copy_runs(MEMORY, at, at + page, n)


def main():
    found, compiled = {}, JITFunction.run

    def run(self, *arguments, grid, warmup, **options):
        kernel = compiled(self, *arguments, grid=grid, warmup=True, **options)
        accesses.update(ACCESS.findall(kernel.asm["ptx"]))
        return kernel

    triton.runtime.driver.set_active(Hopper())
    JITFunction.run = run
    for name, call in launches():
        accesses = Counter()
        call()
        found[name] = accesses
    print(json.dumps(found))


if __name__ == "__main__":
    main()
