"""Keys of chunks are those of the tokens, whoever makes them, and they are made once."""

from __future__ import annotations

import threading
from functools import partial

from disagg.store import ChunkKeys
from disagg.store.keys import grown
from kvpool.prefix.chain import Chain, token_ids

TOKENS = list(range(1000))


def chain(tokens):
    made = Chain(16, "salt")
    made.append(token_ids(tokens))
    return made


def test_keys_are_made_when_they_are_needed():
    own = chain(TOKENS[:40])
    keys = ChunkKeys.when_needed(62, partial(grown, own, token_ids(TOKENS[40:])))
    assert (keys.count, own.num_tokens) == (62, 40)
    assert keys.keys == tuple(chain(TOKENS).keys)
    assert own.num_tokens == 1000
    own.append(token_ids(TOKENS))  # it is the caller's again
    assert keys.keys == tuple(chain(TOKENS).keys)


def test_threads_that_need_keys_at_once_get_the_same():
    expected = tuple(chain(TOKENS).keys)
    for _ in range(50):
        make = partial(grown, Chain(16, "salt"), token_ids(TOKENS))
        keys, answers = ChunkKeys.when_needed(62, make), []
        begin = threading.Barrier(4)

        def ask(keys=keys, answers=answers, begin=begin):
            begin.wait(10)
            answers.append(keys.keys)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert answers == [expected] * 4
