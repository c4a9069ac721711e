"""Whether two deployments fit, and what a hand-off costs, before either runs.

Layouts on the device `meta` have sizes and strides and no memory, so a laptop plans for a cluster.
The same from the command line: `kvpool describe` writes a layout, `kvpool explain` reads them.
"""

from disagg.plan import IncompatibleLayouts, plan
from kvpool import Declaration, PoolLayout, Shard
from kvpool.models import declare

TOKENS = 4000


def stage(
    declared: Declaration, layers: range, rank: int, ranks: int, **options: str | int
) -> PoolLayout:
    """The layout of one rank of a pipeline stage."""
    sizes = {"num_pages": 1024, "page_size": 64, "dtype": "bf16", "device": "meta", **options}
    return declared.build(layers=layers, shard=Shard(rank, ranks), **sizes).layout


def main() -> None:
    declared = declare("llama_3_1_70b")  # 80 layers, 8 KV heads
    prefill = [
        stage(declared, layers, rank, 2)
        for layers in (range(40), range(40, 80))
        for rank in range(2)
    ]
    needed = TOKENS * 80 * 2 * 2 * 128 * 2  # layers, K and V, heads of a rank, dim, bf16
    for rank in range(4):  # decode: all layers on each of 4 ranks, other pages, heads first
        decode = stage(declared, range(80), rank, 4, page_size=16, order="hnd")
        total = plan(prefill, decode).explain(tokens=TOKENS)
        print(f"rank {rank} of 4: {total.nbytes:,} of {needed:,} bytes in {total.runs:,} runs")
        assert total.nbytes == needed
    print(total)

    try:
        plan(prefill[:3], stage(declared, range(80), 0, 4, dtype="f16"))
    except IncompatibleLayouts as refused:
        print(refused)


if __name__ == "__main__":
    main()
