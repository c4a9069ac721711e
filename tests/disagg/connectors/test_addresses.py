"""Where ranks of a serving engine listen, and how its engine is set up, by its settings."""

from __future__ import annotations

import logging
from contextlib import ExitStack, contextmanager

import pytest

from disagg import KVPoll, create_engine
from disagg.connectors.rank.rank import Rank
from disagg.connectors.settings import Settings
from tests import oracle
from tests.disagg.engines.peers import ENGINES
from tests.disagg.runtime.sides import TOKENS, pool
from tests.ports import free_port

needs_mooncake = pytest.mark.skipif("mooncake" not in ENGINES, reason="Mooncake is not installed")


@contextmanager
def rank(number=0, produces=True, **settings):
    """A rank of an engine that was started with these settings, and its pool."""
    state = pool()
    made = Rank(
        Settings.read({"insecure": True, **settings}, "extra"),
        state.layout,
        produces=produces,
        consumes=not produces,
        readers=1,
        log=logging.getLogger("tests.engine"),
        conventions={},
        number=number,
    )
    try:
        yield made, state
    finally:
        made.close()


def test_each_rank_has_the_port_of_its_number_and_the_address_that_is_advertised():
    port = free_port()
    bind, advertise = f"tcp://127.0.0.1:{port}+rank", "tcp://gpu-7.example:31000+rank"
    with ExitStack() as stack:
        ranks = [stack.enter_context(rank(number, bind=bind))[0] for number in (0, 1, 5)]
        addresses = [made.prefill.address for made in ranks]
        assert addresses == [f"tcp://127.0.0.1:{port + number}" for number in (0, 1, 5)]
        place = f"tcp://127.0.0.2:{port}+rank"
        far, _ = stack.enter_context(rank(3, bind=place, advertise=advertise))
        assert far.prefill.address == "tcp://gpu-7.example:31003"
    with (
        pytest.raises(ValueError, match=r"65535\+rank: port 65537 of rank 2: a port is at most"),
        rank(2, bind="tcp://127.0.0.1:65535+rank"),
    ):
        pass


@needs_mooncake
@pytest.mark.parametrize("hostname", [None, "127.0.0.2", "localhost"])
def test_an_engine_gets_its_options_and_moves_bytes_with_them(hostname):
    options = {"chunk": 4096, **({"hostname": hostname} if hostname else {})}
    place = {"engine": "mooncake", "engine_options": options}
    with (
        rank(bind="tcp://127.0.0.3:*", **place) as (sender, source),
        rank(produces=False, **place) as (reader, dest),
    ):
        table, into = oracle.place(source, TOKENS), oracle.place(dest, TOKENS, 9)
        oracle.write(source, table, range(TOKENS), 0)
        oracle.blank(dest)
        peers = (sender.prefill.address,)
        sender.send("r", "r", table, range(TOKENS), last=True)
        reader.receive("r", "r", into, start=0, peers=peers)
        assert reader.decode.wait("r", 60) is KVPoll.Success
        oracle.assert_holds(dest, into, range(TOKENS))
        (hello,) = reader.links.to(peers).hellos
        with_options = create_engine("mooncake")
        assert with_options.offered_host(hello.metadata) == (hostname or "127.0.0.3")


@pytest.mark.parametrize(
    ("engine", "options", "words"),
    [
        ("mooncake", {"hostnam": "a"}, "engine mooncake has no option 'hostnam'; there are "
         "protocol, hostname, device, chunk. Did you mean 'hostname'?"),
        ("local", {"hostname": "a"}, "engine local has no option 'hostname'; there are none."),
        ("mori", {"port": 1}, "engine mori has no option 'port'; there are hostname."),
        ("ascend", {"protocol": "tcp"}, "engine ascend has no option 'protocol'; there are "
         "hostname, chunk."),
        ("mooncake", {"chunk": "4"}, "engine mooncake: chunk='4': a whole number or null."),
        ("mooncake", {"chunk": True}, "engine mooncake: chunk=True: a whole number or null."),
        ("mooncake", {"protocol": None}, "engine mooncake: protocol=None: a text."),
        ("mori", {"hostname": 7}, "engine mori: hostname=7: a text or null."),
        ("nixl", {"patience": "5"}, "engine nixl: patience='5': a number."),
        ("nixl", {"num_workers": 2}, "engine nixl: num_workers=2: a text."),
        ("nixl", {"backend": ["UCX"]}, "engine nixl: backend=['UCX']: a text."),
    ],
)  # fmt: skip
def test_an_option_that_an_engine_does_not_have_is_refused_by_name(engine, options, words):
    with pytest.raises(ValueError) as refused:
        Settings.read({"engine": engine, "engine_options": options}, "extra")
    assert str(refused.value) == f"extra: {words}"
    if engine in ENGINES:
        with pytest.raises(ValueError) as refused:
            create_engine(engine, **options)
        assert str(refused.value) == words
