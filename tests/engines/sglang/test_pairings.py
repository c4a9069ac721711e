"""What docs/sglang-pools.md says of kvpool and of SGLang's own transports, on some of its pairs."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang")

from tests.engines.sglang import sides
from tests.engines.sglang.pairings import PAIRS, Pair, answers

EXPECTED = {
    ("MHATokenToKVPool", "nothing"): ("same", "same", "same"),
    ("MHATokenToKVPool", "page size 16 and 32"): ("same", "refused", "refused"),
    ("MHATokenToKVPool", "a draft of 4 layers on decode only"): ("same", "wrong", "same"),
    ("MHATokenToKVPool", "PP 2 to 1"): ("same", "same", "refused"),
    ("SWAKVPool", "decode lists a page more (seed 5)"): ("same", "wrong", "refused"),
}


@pytest.mark.parametrize("pair", [p for p in PAIRS if p[:2] in EXPECTED], ids=lambda p: p.differs)
def test_a_pair_has_the_answers_of_the_table(pair: Pair):
    with sides.alone():
        found = tuple(answer.partition(":")[0].split()[0] for answer in answers(pair))
    assert found == EXPECTED[pair[:2]]
