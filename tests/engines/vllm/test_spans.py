"""The spans of two real engines join the trace of the request that both served."""

from __future__ import annotations

from disagg.protocol.trace_context import EXAMPLE, parent_of, trace_of
from tests.engines.collector import ENVIRON, Collector
from tests.engines.vllm.engines import PREFILL, prompts

KVPOOL = "kvpool.prefill", "kvpool.decode"


def test_one_request_is_one_trace_through_both_engines(start):
    with Collector() as collector:
        # vLLM's own spans need its numbers
        traced = {
            "otlp_traces_endpoint": collector.url,
            "environ": ENVIRON,
            "disable_log_stats": False,
        }
        prefill = start("prefill", "llama", **traced)
        decode = start("decode", "llama", **traced)
        prefill.ready()
        decode.ready()
        plain, hostile, asked = prompts(77, 40, 300)
        for prompt, headers in (
            (plain, None),
            (hostile, {"traceparent": "00-what-a-client-sends"}),
            (asked, {"traceparent": EXAMPLE}),
        ):
            (first,) = prefill.generate([prompt], params=[PREFILL], tokens=1, headers=headers)
            (last,) = decode.generate([prompt], params=[first["params"]], headers=headers)
            assert last["reason"] == ["length"]
        spans = collector.named(*KVPOOL)
        prefill.idle()
        decode.idle()
    assert [span.name for span in spans] == [*KVPOOL]  # of the last request only
    for span in spans:
        assert (span.trace, span.parent) == (trace_of(EXAMPLE), parent_of(EXAMPLE))
        assert not span.failed
