"""What the scheduler half decides, from requests as vLLM has them."""

from types import SimpleNamespace

import pytest

from disagg.connectors.vllm.scheduler import ConnectorScheduler
from disagg.protocol.messages import room_name


class Groups(SimpleNamespace):
    """Two cache groups, both handed over."""

    def select_transfer_block_ids(self, blocks):
        return tuple(blocks)


class Status(SimpleNamespace):
    """A member of vLLM's RequestStatus."""


def request(name, tokens, status="FINISHED_LENGTH_CAPPED", **params):
    ids = list(range(tokens))
    return SimpleNamespace(
        request_id=name,
        prompt_token_ids=ids,
        _all_token_ids=list(ids),
        num_prompt_tokens=tokens,
        num_computed_tokens=0,
        max_tokens=16,
        status=Status(name=status),
        kv_transfer_params=params,
    )


def output(request, count, blocks, resumed=()):
    return SimpleNamespace(
        num_scheduled_tokens={request.request_id: count},
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=resumed),
        kv_connector_block_state=SimpleNamespace(resolve_block_ids=lambda name: blocks),
    )


def scheduler(stream=False, cuts=False, produces=True, consumes=True, waits=False):
    roles = {"produces": produces, "consumes": consumes}
    made = ConnectorScheduler(Groups(), **roles, stream=stream, cuts=cuts, waits=waits)
    made.serve(["ipc:///a", "ipc:///b"])
    return made


def arrives(made, name, tokens=40, status="FINISHED_LENGTH_CAPPED", **params):
    """A request that has arrived."""
    asked = request(name, tokens, status, **params)
    made.arrived(asked)
    return asked


def computing(made, tokens=40, name="p", **changes):
    """A request that has arrived at prefill."""
    return arrives(made, name, tokens, do_remote_decode=True, **changes)


def prefilled(made, tokens=40, **changes):
    """Prefill's answer for a request of so many tokens."""
    stays, params = made.finished(computing(made, tokens, **changes), ([1, 2, 3], [0, 4, 5]))
    assert stays
    return params


BLOCKS = SimpleNamespace(get_block_ids=lambda: ([7, 8, 9], [0, 6, 5]))


@pytest.mark.parametrize("cuts", [False, True])
def test_all_tokens_but_the_last_are_handed_over(cuts):
    there, here = scheduler(cuts=cuts), scheduler()
    params = prefilled(there)
    (send,) = there.step().sends
    assert (send.start, send.stop, send.last, send.following) == (0, 39, True, 39)
    assert send.blocks == ((1, 2, 3), (0, 4, 5))
    asked = arrives(here, "d", **params)
    assert here.matched(asked, 0) == (39, True)
    here.allocated(asked, BLOCKS, 39)
    (receive,) = here.step().receives
    assert (receive.source.room, receive.start, receive.stop) == (send.room, 0, 39)
    assert receive.source.addresses == ("ipc:///a", "ipc:///b")
    assert receive.blocks == ((7, 8, 9), (0, 6, 5))
    here.allocated(asked, BLOCKS, 0)  # vLLM calls again when the state has come
    assert here.step() == scheduler().step()


def test_embeddings_are_not_handed_over_where_the_state_moves_on(caplog):
    made = scheduler(cuts=True)
    asked = request("p", 40, do_remote_decode=True)
    asked.prompt_token_ids = None
    made.arrived(asked)
    assert made.finished(asked, ([1], [2])) == (False, None)
    assert "embeddings" in caplog.text
    assert made.step() == scheduler().step()


def test_a_room_is_asked_for_once():
    """A sequence that is scheduled after the first has read the room finds it gone."""
    made, params = scheduler(), prefilled(scheduler())
    first, second = (arrives(made, name, **params) for name in ("0_d", "1_d"))
    made.matched(first, 0)
    made.allocated(first, BLOCKS, 39)
    made.received(["0_d"])
    assert made.matched(second, 0) == (0, False)
    assert not made.step().declines


@pytest.mark.parametrize("waits", [False, True])
def test_a_request_waits_in_its_step_or_before_it(waits):
    made = scheduler(waits=waits)
    asked = arrives(made, "d", **prefilled(scheduler()))
    assert made.matched(asked, 0) == (39, not waits)
    made.allocated(asked, BLOCKS, 39)
    assert [each.waits for each in made.step().receives] == [waits]
    made.finished(asked, ())
    assert made.step().aborts == ([] if waits else ["d"])


def test_a_prefix_that_decode_has_is_not_asked_for():
    made = scheduler()
    asked = arrives(made, "d", **prefilled(scheduler()))
    assert made.matched(asked, 32) == (7, True)
    made.allocated(asked, BLOCKS, 7)
    assert made.step().receives[0].start == 32


def test_a_decode_that_has_everything_declines():
    made, params = scheduler(), prefilled(scheduler())
    asked = arrives(made, "d", **params)
    assert made.matched(asked, 39) == (0, False)
    made.allocated(asked, BLOCKS, 0)
    (source,) = made.step().declines
    assert source.room == params["remote_request_id"]
    assert source.addresses == ("ipc:///a", "ipc:///b")


def test_a_request_that_is_stopped_before_it_is_scheduled_declines():
    made, params = scheduler(), prefilled(scheduler())
    assert made.finished(arrives(made, "d", 40, "FINISHED_ABORTED", **params), ()) == (False, None)
    assert [each.room for each in made.step().declines] == [params["remote_request_id"]]


def test_a_request_that_is_stopped_while_it_waits_aborts_its_room():
    made = scheduler()
    asked = arrives(made, "d", 40, "FINISHED_ABORTED", **prefilled(scheduler()))
    made.matched(asked, 0)
    made.allocated(asked, BLOCKS, 39)
    made.finished(asked, ())
    assert made.step().aborts == ["d"]


def test_another_prompt_is_computed_here(caplog):
    made = scheduler()
    asked = arrives(made, "d", 41, **prefilled(scheduler()))
    assert made.matched(asked, 0) == (0, False)
    assert "another prompt" in caplog.text
    assert len(made.step().declines) == 1


def test_parameters_of_another_connector_are_named(caplog):
    made = scheduler()
    asked = arrives(made, "d", do_remote_prefill=True, remote_block_ids=[1])
    assert made.matched(asked, 0) == (0, False)
    assert "remote_request_id, remote_addresses" in caplog.text


def test_the_second_sequence_of_a_prompt_leaves_the_room_to_the_first():
    made, params = scheduler(), prefilled(scheduler())
    first, second = (arrives(made, name, **params) for name in ("0_d", "1_d"))
    made.matched(first, 0)
    made.allocated(first, BLOCKS, 39)
    assert made.matched(second, 0) == (0, False)
    step = made.step()
    assert len(step.receives) == 1
    assert not step.declines


@pytest.mark.parametrize("cuts", [False, True])
def test_a_room_that_a_proxy_names_is_that_of_one_prompt(cuts):
    there, here = scheduler(cuts=cuts), scheduler()
    rooms = [prefilled(there, tokens, room="x")["remote_request_id"] for tokens in (40, 50, 40)]
    assert len({*rooms}) == 3  # the last is the first's prompt once more
    known = {"do_remote_prefill": True, "remote_addresses": ["ipc:///a"], "room": "x"}
    asked = [arrives(here, f"d{tokens}", tokens, **known) for tokens in (40, 50, 60)]
    for each in asked:
        assert here.matched(each, 0) == (each.num_prompt_tokens - 1, True)
        here.allocated(each, BLOCKS, each.num_prompt_tokens - 1)
    found = [each.source.room for each in here.step().receives]
    assert found[:2] == rooms[:2]
    assert found[2] not in rooms


def test_a_number_is_a_room_of_sglang():
    there, here = scheduler(), scheduler()
    params = prefilled(there, room=2**62)
    assert params["remote_request_id"] == 2**62
    asked = arrives(here, "d", **params)
    assert here.matched(asked, 0) == (39, True)
    assert prefilled(there, room=2**62)["remote_request_id"] != 2**62  # it was named before


def test_an_aborted_prefill_is_not_handed_over():
    made = scheduler()
    asked = computing(made, status="FINISHED_ABORTED")
    assert made.finished(asked, ([1], [2])) == (False, None)
    assert made.step() == scheduler().step()


def test_rooms_of_one_engine_have_different_names():
    made = scheduler()
    assert len({prefilled(made)["remote_request_id"] for _ in range(3)}) == 3


@pytest.mark.parametrize("name", ["x" * 300, "a\x9bb", "\udce9"])
def test_a_request_whose_id_is_no_name_has_a_room_all_the_same(name):
    made = scheduler()
    rooms = []
    for _ in range(2):
        asked = computing(made, name=name)
        rooms.append(made.finished(asked, ([1, 2, 3], [0, 4, 5]))[1]["remote_request_id"])
    assert [room_name(room) for room in rooms] == rooms and rooms[0] != rooms[1]


@pytest.mark.parametrize("named", ["a\nb", "x" * 300, -1, 1 << 63])
def test_a_room_that_a_proxy_calls_by_no_name_is_computed_here(named, caplog):
    made = scheduler()
    asked = computing(made, room=named)
    assert made.finished(asked, ([1, 2, 3], [0, 4, 5])) == (False, None)
    params = {"do_remote_prefill": True, "remote_addresses": ["ipc:///a"], "room": named}
    assert made.matched(arrives(made, "d", **params), 0) == (0, False)
    assert caplog.text.count("1 to 256 printable characters") == 2


def test_a_prompt_is_offered_while_it_is_computed():
    made = scheduler(stream=True)
    asked = computing(made)
    for count, table in ((16, ([1], [9])), (16, ([1, 2], [9, 8])), (8, ([1, 2, 3], [0, 8, 7]))):
        made.scheduled(output(asked, count, table))
        asked.num_computed_tokens += count
    sends = made.step().sends
    assert [(send.start, send.stop, send.last) for send in sends] == [
        (0, 16, False),
        (16, 32, False),
        (32, 39, True),
    ]
    assert sends[2].blocks == ((1, 2, 3), (0, 8, 7))
    assert made.finished(asked, ([1, 2, 3], [0, 8, 7]))[0]
    assert not made.step().sends


def test_what_was_offered_of_a_preempted_request_is_taken_back():
    made = scheduler(stream=True)
    asked = computing(made)
    made.scheduled(output(asked, 16, ([1], [2])))
    first = made.step().sends[0].room
    made.scheduled(output(asked, 40, ([3], [4]), resumed=("p",)))
    step = made.step()
    assert step.aborts == ["p"]
    assert [(send.start, send.stop, send.last) for send in step.sends] == [(0, 39, True)]
    assert step.sends[0].room != first
    assert made.finished(asked, ([3], [4]))[1]["remote_request_id"] == step.sends[0].room


@pytest.mark.parametrize(
    "wrong",
    [
        {"remote_addresses": 7},
        {"remote_addresses": [7]},
        {"remote_request_id": [7]},
        {"remote_request_id": -7},
        {"remote_request_id": True},
    ],
)
def test_parameters_of_a_client_that_are_of_another_type_are_refused(wrong, caplog):
    made = scheduler()
    asked = arrives(made, "d", **prefilled(scheduler()) | wrong)
    assert made.matched(asked, 0) == (0, False)
    assert f"kv_transfer_params: {next(iter(wrong))}" in caplog.text
    assert made.step() == scheduler().step()


def test_an_engine_of_the_other_role_computes_the_request_itself(caplog):
    consumer, producer = scheduler(produces=False), scheduler(consumes=False)
    asked = computing(consumer)
    assert consumer.finished(asked, ([1], [2])) == (False, None)
    assert "Send it to a kv_producer" in caplog.text
    asked = arrives(producer, "d", **prefilled(scheduler()))
    assert producer.matched(asked, 0) == (0, False)
    assert "Send it to a kv_consumer" in caplog.text
    assert producer.step() == consumer.step() == scheduler().step()
