"""The programs of examples/ run as they stand, and say what they claim to show."""

from __future__ import annotations

import importlib
import multiprocessing
import re
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SAYS = {
    "engine_tensors": r"target k \(layers 0-3\): resharded(.|\n)*100 tokens of 4 layers are equal",
    "picker": r"(?s)'prefill': \['(http\S+)'\], 'decode': \['(http\S+)'\].*'prefill': \[\], 'de"
    r".*r1: \1 prefills, \2 decodes, 51,200 bytes\nr2: \1 prefills, \2 decodes, 51,200",
    "request_life": r"shares 12 of 13 pages\n.*0 of \d+ are free.*\n"
    r"202 tokens came back as they were written\n.*\{'kv': 0, 'swa': 0\}",
    "reshard": r"rank 3 of 4: 327,680,000 of 327,680,000 bytes(.|\n)*"
    r"bfloat16 on prefill, float16 on decode",
    "snapshot": r"200 tokens(.|\n)*both ranks hold what was written\n2 reasons",
    # rooms may end in any order
    "two_processes": r"(?s)(?=.*r1: 100 tokens)(?=.*r2: 37 tokens)"
    r"(?=.*r3: 250 tokens arrived as computed)",
}


def test_there_are_seven_programs_of_at_most_90_lines():
    lines = {path.stem: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert sorted(lines) == sorted(["batcher", *SAYS])  # test_batcher.py runs that one
    assert {name: count for name, count in lines.items() if count > 90} == {}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", SAYS)
def test_a_program_shows_what_it_claims(name, capsys, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    # by its name: a process that it spawns imports it too
    monkeypatch.delitem(sys.modules, name, raising=False)
    others = {*multiprocessing.active_children()}
    importlib.import_module(name).main()
    assert re.search(SAYS[name], capsys.readouterr().out)
    for child in {*multiprocessing.active_children()} - others:
        child.join(30)
        assert child.exitcode == 0
