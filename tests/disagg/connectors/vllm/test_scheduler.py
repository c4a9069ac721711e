"""What the scheduler half decides, from requests as vLLM has them."""

from types import SimpleNamespace

import pytest

from disagg.connectors.steps import Step
from disagg.connectors.vllm.scheduler import ConnectorScheduler
from disagg.protocol.messages import room_name
from disagg.protocol.trace_context import EXAMPLE

GROUPS = SimpleNamespace(select_transfer_block_ids=tuple)
"""Cache groups which are all handed over."""
STOPPED = "FINISHED_ABORTED"


def request(name, tokens, status="FINISHED_LENGTH_CAPPED", **params):
    ids = list(range(tokens))
    return SimpleNamespace(
        request_id=name,
        prompt_token_ids=ids,
        _all_token_ids=list(ids),
        num_prompt_tokens=tokens,
        num_computed_tokens=0,
        max_tokens=16,
        sampling_params=SimpleNamespace(allowed_token_ids=None),
        status=SimpleNamespace(name=status),
        kv_transfer_params=params,
        trace_headers=None,
    )


def output(request, count, blocks, resumed=()):
    return SimpleNamespace(
        num_scheduled_tokens={request.request_id: count},
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=resumed),
        kv_connector_block_state=SimpleNamespace(resolve_block_ids=lambda name: blocks),
    )


def scheduler(**options):
    made = ConnectorScheduler(GROUPS, **{"produces": True, "consumes": True} | options)
    made.serve(["ipc:///a", "ipc:///b"])
    return made


def arrives(made, name, tokens=40, status="FINISHED_LENGTH_CAPPED", **params):
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


@pytest.mark.parametrize("moves", [{}, {"window": True}, {"state": True}])
def test_all_tokens_but_the_last_are_handed_over(moves):
    there, here = scheduler(**moves), scheduler()
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
    assert here.step() == Step()


@pytest.mark.parametrize("said", [EXAMPLE, "00-what-a-client-sends", f"{EXAMPLE}\n", "", None])
def test_a_trace_goes_to_the_workers_and_what_is_none_does_not(said):
    here = scheduler()
    asked = arrives(here, "d", **prefilled(scheduler()))
    asked.trace_headers = None if said is None else {"traceparent": said, "tracestate": "a=b"}
    here.matched(asked, 0)
    here.allocated(asked, BLOCKS, 39)
    (receive,) = here.step().receives
    assert receive.traceparent == (EXAMPLE if said == EXAMPLE else None)


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("ours", [1, 3])
def test_what_a_drafter_reads_ahead_is_computed_by_decode(state, ours):
    """Also by a decode without a drafter: prefill says how many tokens it hands over."""
    there, here = scheduler(recomputes=3, state=state, drafts=True), scheduler(recomputes=ours)
    asked = computing(there)
    stays, params = there.finished(asked, ([1, 2, 3], [0, 4, 5]))
    (send,) = there.step().sends
    assert stays and (send.start, send.stop, send.following) == (0, 37, 37)
    assert asked.num_prompt_tokens == len(asked.prompt_token_ids) == (37 if state else 40)
    assert asked.sampling_params.allowed_token_ids == ([37] if state else None)
    wanted = arrives(here, "d", **params)
    assert here.matched(wanted, 0) == (37, True)
    here.allocated(wanted, BLOCKS, 37)
    (receive,) = here.step().receives
    assert (receive.start, receive.stop) == (0, 37)


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_a_prompt_that_decode_computes_whole_is_not_handed_over(tokens):
    made = scheduler(recomputes=3, state=True)
    asked = computing(made, tokens)
    assert made.finished(asked, ([1], [2])) == (False, None)
    assert asked.num_prompt_tokens == tokens and made.step() == Step()


def test_embeddings_are_not_handed_over_where_the_state_moves_on(caplog):
    made = scheduler(state=True)
    asked = request("p", 40, do_remote_decode=True)
    asked.prompt_token_ids = None
    made.arrived(asked)
    assert made.finished(asked, ([1], [2])) == (False, None)
    assert "embeddings" in caplog.text
    assert made.step() == Step()


@pytest.mark.parametrize("read", [True, False])
def test_the_second_sequence_of_a_prompt_leaves_the_room_to_the_first(read):
    """Also where the first has read it before the second is scheduled."""
    made, params = scheduler(), prefilled(scheduler())
    first, second = (arrives(made, name, **params) for name in ("0_d", "1_d"))
    made.allocated(first, BLOCKS, 39)
    if read:
        made.received(["0_d"])
    assert made.matched(second, 0) == (0, False)
    step = made.step()
    assert len(step.receives) == 1 and not step.declines


@pytest.mark.parametrize("waits", [False, True])
def test_a_request_waits_in_its_step_or_before_it(waits):
    """One that is stopped before its state has come aborts its room."""
    made = scheduler(waits=waits)
    asked = arrives(made, "d", **prefilled(scheduler()))
    assert made.matched(asked, 32) == (7, not waits)  # of 32 decode has the state
    made.allocated(asked, BLOCKS, 7)
    (receive,) = made.step().receives
    assert (receive.start, receive.waits) == (32, waits)
    made.finished(asked, ())
    assert made.step().aborts == ([] if waits else ["d"])


@pytest.mark.parametrize("stopped", [True, False])
def test_a_decode_that_has_everything_or_is_stopped_declines(stopped):
    made, params = scheduler(), prefilled(scheduler())
    asked = arrives(made, "d", **params)
    if stopped:
        assert made.finished(asked, ()) == (False, None)
    else:
        assert made.matched(asked, 39) == (0, False)
        made.allocated(asked, BLOCKS, 0)
    (source,) = made.step().declines
    assert source.room == params["remote_request_id"]
    assert source.addresses == ("ipc:///a", "ipc:///b")


@pytest.mark.parametrize(
    ("tokens", "changed", "words"), [(40, 7, "another prompt"), (39, None, "39 tokens, the prompt")]
)
def test_another_prompt_is_computed_here(tokens, changed, words, caplog):
    made = scheduler()
    asked = request("d", tokens, **prefilled(scheduler()))
    if changed is not None:
        asked.prompt_token_ids[changed] = 500
    made.arrived(asked)
    assert made.matched(asked, 0) == (0, False)
    assert words in caplog.text
    assert len(made.step().declines) == 1


def test_of_a_longer_prompt_decode_computes_the_rest():
    made = scheduler()
    asked = arrives(made, "d", 50, **prefilled(scheduler()))
    assert made.matched(asked, 16) == (23, True)


@pytest.mark.parametrize("state", [False, True])
def test_a_room_that_a_proxy_names_is_that_of_one_prompt(state):
    there, here = scheduler(state=state), scheduler()
    rooms = [prefilled(there, tokens, room="x")["remote_request_id"] for tokens in (40, 50, 40)]
    assert len({*rooms}) == 3  # the last is the first's prompt once more
    known = {"do_remote_prefill": True, "remote_addresses": ["ipc:///a"], "room": "x"}
    for tokens in (40, 50, 60):
        asked = arrives(here, f"d{tokens}", tokens, **known)
        assert here.matched(asked, 0) == (tokens - 1, True)
        here.allocated(asked, BLOCKS, tokens - 1)
    read = [receive.source.room for receive in here.step().receives]
    assert read[:2] == rooms[:2]
    assert read[2] not in rooms


def test_a_number_is_a_room_of_sglang():
    there, here = scheduler(), scheduler()
    params = prefilled(there, room=2**62)
    assert params["remote_request_id"] == 2**62
    assert here.matched(arrives(here, "d", **params), 0) == (39, True)
    assert prefilled(there, room=2**62)["remote_request_id"] != 2**62  # it was named before


def test_an_aborted_prefill_is_not_handed_over():
    made = scheduler()
    assert made.finished(computing(made, status=STOPPED), ([1], [2])) == (False, None)
    assert made.step() == Step()


@pytest.mark.parametrize("name", ["p", "x" * 300, "a\x9bb", "\udce9"])
def test_each_request_has_a_room_of_its_own_also_if_its_id_is_no_name(name):
    made = scheduler()
    rooms = [prefilled(made, name=name)["remote_request_id"] for _ in range(2)]
    assert [room_name(room) for room in rooms] == rooms and rooms[0] != rooms[1]


@pytest.mark.parametrize("named", ["a\nb", "x" * 300, -1, 1 << 63])
def test_a_room_that_a_proxy_calls_by_no_name_is_computed_here(named, caplog):
    made = scheduler()
    assert made.finished(computing(made, room=named), ([1, 2, 3], [0, 4, 5])) == (False, None)
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


@pytest.mark.parametrize("stream", [False, True])
def test_workers_know_whether_a_step_computes_anything(stream):
    made = scheduler(stream=stream)
    nothing = output(computing(made), 16, ([1], [9]))
    made.scheduled(nothing)
    assert not made.step().idle
    nothing.num_scheduled_tokens.clear()
    made.scheduled(nothing)
    assert made.step().idle


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
    ("wrong", "words"),
    [
        ({"remote_addresses": 7}, "remote_addresses"),
        ({"remote_addresses": [7]}, "remote_addresses"),
        ({"remote_request_id": [7]}, "remote_request_id"),
        ({"remote_request_id": -7}, "remote_request_id"),
        ({"remote_request_id": True}, "remote_request_id"),
        ({"remote_num_tokens": "39"}, "remote_num_tokens"),
        ({"remote_num_tokens": 0}, "remote_num_tokens"),
        ({"remote_num_tokens": True}, "remote_num_tokens"),
        # of another connector
        (dict.fromkeys(("remote_request_id", "remote_addresses")), "no remote_request_id, remote"),
    ],
)
def test_parameters_of_a_client_that_cannot_be_are_refused_by_name(wrong, words, caplog):
    made = scheduler()
    asked = arrives(made, "d", **prefilled(scheduler()) | wrong)
    assert made.matched(asked, 0) == (0, False)
    assert "kv_transfer_params" in caplog.text and words in caplog.text
    assert made.step() == Step()


@pytest.mark.parametrize("role", ["remote_prefiller", "remote_kv_source"])
def test_a_role_of_other_proxies_is_refused_by_name_unless_ours_is_there_too(role, caplog):
    made, other = scheduler(), {role: {"host": "a", "port": 1}}
    assert made.matched(arrives(made, "x", **other), 0) == (0, False)
    assert f"request x is computed here, and not handed over: kv_transfer_params say {role}" in (
        caplog.text
    )
    assert made.matched(arrives(made, "d", **prefilled(scheduler()), **other), 0) == (39, True)


def test_an_engine_of_the_other_role_computes_the_request_itself(caplog):
    consumer, producer = scheduler(produces=False), scheduler(consumes=False)
    assert consumer.finished(computing(consumer), ([1], [2])) == (False, None)
    assert "Send it to a kv_producer" in caplog.text
    asked = arrives(producer, "d", **prefilled(scheduler()))
    assert producer.matched(asked, 0) == (0, False)
    assert "Send it to a kv_consumer" in caplog.text
    assert producer.step() == consumer.step() == Step()


@pytest.mark.parametrize("moves", [{}, {"window": True}, {"state": True}, {"stream": True}])
def test_a_whole_prompt_goes_with_the_token_that_prefill_samples(moves):
    """For a decode of SGLang's, which computes nothing of the prompt."""
    made = scheduler(**moves)
    asked = computing(made, room=7, whole=True)
    made.scheduled(output(asked, 40, ([1, 2, 3], [0, 4, 5])))
    asked.output_token_ids = [99]
    stays, params = made.finished(asked, ([1, 2, 3], [0, 4, 5]))
    sends = made.step().sends
    ranges = [(send.start, send.stop, send.last, send.following) for send in sends]
    early = [(0, 39, False, None)] if "stream" in moves else []
    assert ranges == [*early, (39 if early else 0, 40, True, 99)]
    assert stays and sends[0].room == 7 and params["remote_num_tokens"] == 40
    assert asked.num_prompt_tokens == len(asked.prompt_token_ids) == 40


def test_a_whole_prompt_is_refused_where_a_drafter_reads_ahead(caplog):
    made = scheduler(recomputes=3, drafts=True)
    asked = computing(made, whole=True)
    assert made.finished(asked, ([1], [2])) == (False, None)
    assert "whole: the drafter's state ends before the prompt does" in caplog.text
