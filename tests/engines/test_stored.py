"""What is said of a store's reader that has other tokens, bytes or counts than it should."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.engines.chunks import until_stored
from tests.engines.pool_side import PoolSide
from tests.engines.process import EngineFailed
from tests.engines.stored import read, recompute, write
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


def written_by(side, url, **more):
    """Whoever reads it does not wait, since it has not looked for geometries before."""
    return replace(write(side, url, ASKED, **more), when=0.0)


def test_a_reader_that_is_right_has_no_faults(sides, tmp_path):
    url, one, other = sides
    written = written_by(one, url, tenant="a")
    assert recompute(one, ASKED) == written.answers
    reading = read(written, other, recompute(other, ASKED), tmp_path / "compared")
    assert reading.faults == []
    assert (reading.cached, reading.right, reading.different) == ([256, 0], 2, 0)
    assert (reading.tensors, reading.nbytes) == (8, 256 * 4 * 4 * 32 * 2 * 4)


def test_another_byte_is_told_by_layer(sides, tmp_path):
    url, one, other = sides
    written = written_by(one, url)
    (path,) = (tmp_path / "one").iterdir()
    state = torch.load(path)
    state["2/v"][255, 3, 31] += 1
    torch.save(state, path)
    reading = read(written, other, written.answers, tmp_path / "compared")
    assert reading.different == 1
    (fault,) = reading.faults
    assert "reads what PoolCache, pages 16 has written: 1 of 8 tensors differ: " in fault
    assert " 2/v " in fault


def test_other_tokens_are_told(sides, tmp_path):
    url, one, other = sides
    written = written_by(one, url)
    right = written.answers[0].tokens
    others = [replace(written.answers[0], tokens=[*right[:-1], 512]), written.answers[1]]
    reading = read(written, other, others, tmp_path / "compared")
    assert reading.right == 1
    (fault,) = reading.faults
    told = f"of a prompt of 300 tokens the answer is {right}, without the store ["
    assert told in fault and fault.endswith(" 512].")
    assert read(written, other, others, tmp_path / "again", first=23).right == 2


def test_a_reader_that_finds_nothing_is_told(sides, tmp_path):
    url, one, other = sides
    written = written_by(one, url)
    for path in (tmp_path / "store").rglob("*.full"):
        path.unlink()
    with pytest.raises(EngineFailed, match="lacks objects of 1 chunks after 0 s"):
        until_stored(url, ASKED, seconds=0.0)
    faults = read(written, other, written.answers, tmp_path / "compared").faults
    assert [fault.partition(" has written: ")[2] for fault in faults] == [
        "of a prompt of 300 tokens 0 are cached, not 256.",
        "no byte was compared.",
    ]


def test_a_writer_that_has_not_computed_is_refused(sides):
    url, one, other = sides
    write(one, url, ASKED)
    with pytest.raises(EngineFailed, match="nothing has written, counts 256 tokens as cached"):
        write(other, url, ASKED)
