"""The bytes of every case of `kvpool bench --quick`, from the formats."""

from __future__ import annotations

from disagg.engines.base import engine_names

PAGES, RUNS, READ = 2, 1 << 20, 2 << 20  # of the quick sizes
HANDED = {"1 token": (1, 1), "512 tokens": (512, 512), "512 tokens in chunks of 256": (512, 256)}


def state_bytes(tokens, last):
    """Bytes that come with the `last` of a request's tokens, in 8 layers of each family."""
    window = min(tokens, 127)
    rows = 448 + 2 * 64 + 7
    rings = 3 * (1 * 4 * (512 + 128) * 4 + 1 * 2 * 512 * 4)  # ratio 4; ratio 128, an open window
    if tokens % 128 == 0:
        rings = 3 * 4 * 4 * (512 + 128) * 4
    return {
        "MHA": 8 * last * 2 * 2 * 128 * 2,  # of 8 heads a rank of 4 has 2
        "MLA": 8 * last * 1152,
        "NSA": 8 * last * (656 + 132),
        "SWA": 4 * (last + window) * 2 * 8 * 64 * 2,
        "HybridLinear": 2 * last * 2 * 2 * 256 * 2
        + 6 * (3 * (2 * 16 + 32) * 128 * 2 + 32 * 128 * 128 * 4),
        "DSv4": 8 * window * rows + 3 * (last // 4 * (rows + 132) + last // 128 * rows) + rings,
    }


COUNTED = {
    # a token's values in bf16 and its bytes in the pool, halved: what a copy as heavy moves
    **{
        (group, name): tokens * (given + stored) // 2
        for group in ("store", "load")
        for name, tokens, given, stored in (
            ("K and V 8 x 128, NHD", 128, 2 * 8 * (128 + 128), 2 * 8 * (128 + 128)),
            ("K and V 8 x 128, HND", 128, 2 * 8 * (128 + 128), 2 * 8 * (128 + 128)),
            ("MLA bf16, 1152 B", 128, 2 * (512 + 64), 1152),
            ("MLA fp8, 656 B", 256, 2 * (512 + 64), 512 + 4 * 4 + 2 * 64),
            ("index keys fp8, 132 B", 1280, 2 * 128, 128 + 4),
            ("DSv4 fp8, 584 B", 256, 2 * 512, 448 + 2 * 64 + 7),
        )
    },
    **{
        ("move", f"MLA by {placement}, {ids} ids"): PAGES * 61 * 73_728
        for placement in ("layer", "page")
        for ids in ("device", "host")
    },
    **{
        (group, name): RUNS // width * width
        for group in ("gather", "scatter")
        for name, width in (("512 B", 512), ("4 KiB", 4096), ("36 KiB", 36_864))
    },
    **{
        ("transfer", f"{engine}, {name}"): READ // width * width
        for engine in engine_names()
        for name, width in (
            *(("1 KiB", 1024), ("4 KiB", 4096), ("36 KiB", 36_864), ("1 MiB", 1 << 20)),
            ("one run", READ),
        )
    },
    **{
        ("handoff", f"local, {family}, {name}"): nbytes
        for name, (tokens, last) in HANDED.items()
        for family, nbytes in state_bytes(tokens, last).items()
    },
}
