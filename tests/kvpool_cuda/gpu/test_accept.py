"""What `kvpool accept` tries on a GPU: the conformance kit, streams, graphs, IPC, engines."""

from __future__ import annotations

import pytest

from tests.disagg.cli.accepting import accepted


@pytest.mark.timeout(900)
@pytest.mark.parametrize("section", ["conformance", "streams", "graphs", "ipc", "engines"])
def test_the_gpu_is_accepted(tmp_path, section):
    status, said, report = accepted(tmp_path, "cuda:0", "--only", section, timeout=900)
    assert status == 0, said
    assert report.sections[0].state == "passed"
