"""A collector of OpenTelemetry's spans over HTTP, for engines in processes of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

ENVIRON = {
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    "OTEL_BSP_SCHEDULE_DELAY": "50",
    "SGLANG_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS": "50",
}
"""Of an engine that sends its spans here, soon."""


@dataclass(frozen=True)
class Span:
    """One that has arrived; ids in hexadecimal digits."""

    name: str
    trace: str
    id: str
    parent: str
    failed: bool


class Collector(ThreadingHTTPServer):
    """Keeps what arrives at `url`, until the end of its block."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1/traces"
        self.spans: list[Span] = []
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,))

    def take(self, body: bytes) -> None:
        batch = ExportTraceServiceRequest.FromString(body)
        with self._news:
            for resource in batch.resource_spans:
                for scope in resource.scope_spans:
                    self.spans += [
                        Span(
                            name=span.name,
                            trace=span.trace_id.hex(),
                            id=span.span_id.hex(),
                            parent=span.parent_span_id.hex(),
                            failed=span.status.code == span.status.STATUS_CODE_ERROR,
                        )
                        for span in scope.spans
                    ]
            self._news.notify_all()

    def named(self, *names: str, ready: Callable[[], bool] = lambda: True) -> list[Span]:
        """Spans of these names, in their order, once there is one of each and all is `ready`."""

        def found() -> list[Span]:
            return [span for name in names for span in self.spans if span.name == name]

        with self._news:
            arrived = self._news.wait_for(lambda: len(found()) >= len(names) and ready(), 60)
            assert arrived, sorted(span.name for span in self.spans)
            return found()

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
        self.server.take(body)
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Not a line for each request."""
