"""The spans of two real engines join the trace of the request that both served."""

from __future__ import annotations

from disagg.protocol.trace_context import EXAMPLE, parent_of, trace_of
from tests.engines.collector import ENVIRON, Collector
from tests.engines.sglang.engines import failure, handed_over
from tests.engines.vllm.engines import prompts

KVPOOL = "kvpool.prefill", "kvpool.decode"


def test_one_request_is_one_trace_through_both_engines(start):
    with Collector() as collector:
        traced = {
            "enable_trace": True,
            "otlp_traces_endpoint": collector.url,
            "environ": ENVIRON,
        }
        prefill = start("prefill", "llama", **traced)
        decode = start("decode", "llama", **traced)
        headers = {"traceparent": EXAMPLE}
        (answer,) = handed_over(
            prefill.ready(), decode.ready(), prompts(77), external_trace_header=headers
        )
        assert not failure(answer)

        def requests():
            """SGLang's own spans of the request, one of each server."""
            return [span for span in collector.spans if span.parent == parent_of(EXAMPLE)]

        spans = collector.named(*KVPOOL, ready=lambda: len(requests()) == 2)
        prefill.idle()
        decode.idle()
    assert [span.name for span in spans] == [*KVPOOL]
    assert {span.trace for span in (*spans, *requests())} == {trace_of(EXAMPLE)}
    (parent,) = {span.parent for span in spans}
    (owner,) = [span for span in requests() if span.id == parent]
    assert owner.name.startswith("decode")
    assert not any(span.failed for span in spans)
