"""State written once, read by any engine: chunks of tokens, written at any TP and page size.

store = Store("file:///cache", pool.layout, conventions=conventions(config))
store.write(tokens, request.address())          # whole chunks, behind serving
known = store.lookup(tokens)                    # how many of the first tokens are there
job = store.read(tokens, request.address())     # of a request of so many tokens
for ended in store.ended(): ...                 # ended.job, ended.failure
"""

from disagg.store.jobs import DeferredAddress, EndedJob
from disagg.store.keys import ChunkKeys
from disagg.store.lookup import Hit
from disagg.store.stats import StoreStats
from disagg.store.store import Store

__all__ = ["ChunkKeys", "DeferredAddress", "EndedJob", "Hit", "Store", "StoreStats"]
