"""What is said of a store's reader that has other tokens, bytes or counts than it should."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.engines.chunks import until_stored
from tests.engines.pool_side import PoolSide
from tests.engines.process import EngineFailed
from tests.engines.stored import read, write
from tests.engines.vllm.engines import prompts
from tests.engines.vllm.models import save

ASKED = prompts(300, 77)


@pytest.fixture
def sides(models, tmp_path, one_thread):
    for name in ("store", "one", "other"):
        (tmp_path / name).mkdir()
    url, model = f"file://{tmp_path}/store", save("llama", models)
    watches = tmp_path / "one", tmp_path / "other"
    with PoolSide(model, url, watches[0]) as one, PoolSide(model, url, watches[1]) as other:
        yield url, one, other


def test_a_reader_that_is_right_has_no_faults(sides, tmp_path):
    url, one, other = sides
    reading = read(write(one, url, ASKED), other, tmp_path / "compared")
    assert reading.faults == []
    assert (reading.cached, reading.equal, reading.different) == ([256, 0], 2, 0)
    assert (reading.tensors, reading.nbytes) == (8, 256 * 4 * 4 * 32 * 2 * 4)


def test_another_byte_is_told_by_layer(sides, tmp_path):
    url, one, other = sides
    written = write(one, url, ASKED)
    (path,) = (tmp_path / "one").iterdir()
    state = torch.load(path)
    state["2/v"][255, 3, 31] += 1
    torch.save(state, path)
    reading = read(written, other, tmp_path / "compared")
    assert reading.different == 1
    (fault,) = reading.faults
    assert "reads what PoolCache, pages 16 has written: 1 of 8 tensors differ: " in fault
    assert " 2/v " in fault


def test_other_tokens_are_told(sides, tmp_path):
    url, one, other = sides
    written = write(one, url, ASKED)
    right = written.answers[0].tokens
    answers = [replace(written.answers[0], tokens=[*right[:-1], 7]), written.answers[1]]
    reading = read(replace(written, answers=answers), other, tmp_path / "compared")
    assert reading.equal == 1
    (fault,) = reading.faults
    assert f"after a prompt of 300 tokens come {right}, of the writer [" in fault
    assert read(written, other, tmp_path / "again", exact=False).equal == 2


def test_a_reader_that_finds_nothing_is_told(sides, tmp_path):
    url, one, other = sides
    written = write(one, url, ASKED)
    for path in (tmp_path / "store").rglob("*.full"):
        path.unlink()
    with pytest.raises(EngineFailed, match="lacks objects of 1 chunks after 0 s"):
        until_stored(url, ASKED, seconds=0.0)
    faults = read(written, other, tmp_path / "compared").faults
    assert [fault.partition(" has written: ")[2] for fault in faults] == [
        "of a prompt of 300 tokens 0 are cached, not 256.",
        "nothing was compared.",
    ]


def test_a_writer_that_has_computed_nothing_is_refused(sides):
    url, one, other = sides
    write(one, url, ASKED)
    with pytest.raises(EngineFailed, match="counts 256 tokens of a prompt of 300 as cached"):
        write(other, url, ASKED)
