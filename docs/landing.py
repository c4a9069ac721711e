from functools import partial

from disagg.plan import plan
from kvpool import MHAPool, RequestAddress, Shard, Span

build = partial(MHAPool, layers=range(4), num_kv_heads=8, head_dim=64, dtype="bf16", num_pages=9)
prefill = [build(page_size=32, order="hnd", shard=Shard(n, 2)) for n in range(2)]
decode = build(page_size=16)
transfer = plan([pool.layout for pool in prefill], decode.layout)  # or every reason why not
source, dest = (RequestAddress(64, {"kv": Span(ids)}) for ids in ([5, 2], [8, 4, 3, 7]))
for batch in transfer.bind_all([source, source], dest, tokens=range(64)):
    print(batch.src, batch.dst, batch.nbytes)  # addresses and lengths, coalesced
