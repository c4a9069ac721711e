"""Tables of figures stand between the marks of their benchmark."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.bench.figures import PAGE as FIGURES, SHARED, figure, time_of, write_all

PAGE = """# Figures

<!-- figures of all tables -->
<!-- end of figures -->

<!-- figures of test_a.py -->
old
<!-- end of figures -->

Words stay.

<!-- figures of test_b.py -->
<!-- end of figures -->
"""


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "performance.md"
    path.write_text(PAGE)
    return path


def rows(path):
    return [line for line in path.read_text().splitlines() if line.startswith("|")]


def test_a_ratio_is_the_median_of_rounds_with_its_middle_half(page):
    # ratios 1, 2, 3, 4, 9: half of them between 2 and 4
    ours, reference = [0.001] * 5, [0.004, 0.001, 0.009, 0.003, 0.002]
    write_all([figure("test_a.py", "test_of_one_page[2048]", ours, reference)], page)
    assert rows(page) == [
        "|case|ratio|time|",
        "|---|--:|--:|",
        "|of one page, 2048|3.00 ±1.00|1 ms|",
    ]


@pytest.mark.parametrize(
    ("seconds", "written"),
    [(1.5, "1.5 s"), (0.0123, "12.3 ms"), (-0.0024, "-2.4 ms"), (3e-7, "0.3 µs")],
)
def test_times_have_three_digits(seconds, written):
    assert time_of(seconds) == written


def test_engines_are_columns(page):
    titles = ["test_room[nixl-4 KiB]", "test_room[local-4 KiB]", "test_room[waits-nixl-tcp-memfd]"]
    write_all([figure("test_b.py", title, [1.0], [2.0]) for title in titles], page)
    assert rows(page) == [
        "|case|`nixl`|`local`|`nixl-tcp`|",
        "|---|--:|--:|--:|",
        "|room, 4 KiB|2.00, 1 s|2.00, 1 s||",
        "|room, waits, memfd|||2.00, 1 s|",
    ]


def test_other_words_of_the_page_stay(page):
    for _ in range(2):  # written again, a table takes the place of the last one
        write_all([figure("test_a.py", "test_x", [1.0], [2.0])], page)
    text = page.read_text()
    assert "old" not in text and text.count("|x|") == 1
    assert "<!-- end of figures -->\n\nWords stay.\n\n<!-- figures of test_b.py -->" in text


def test_where_and_when_stands_above_tables_that_differ_in_it(page, monkeypatch):
    def measured(where, *names):
        monkeypatch.setattr("tests.bench.figures.where_and_when", lambda: where)
        write_all([figure(f"test_{name}.py", "test_x", [1.0], [2.0]) for name in names], page)
        return page.read_text()

    first, second = "2 cores, Monday.", "4 cores, Friday."
    assert measured(first, "a", "b").count(first) == 1
    assert page.read_text().index(first) < page.read_text().index("figures of test_a.py")
    text = measured(second, "b")
    assert text.count(first) == text.count(second) == 1
    assert text.index("test_a.py") < text.index(first) < text.index("test_b.py")
    text = measured(second, "a")
    assert (text.count(first), text.count(second)) == (0, 1)


def test_a_page_without_marks_is_refused_and_stays(page):
    with pytest.raises(ValueError, match=r"no table of test_c.py. Write <!-- figures of test_c"):
        write_all([figure(f"test_{name}.py", "test_x", [1.0], [2.0]) for name in "ac"], page)
    assert page.read_text() == PAGE


def test_every_benchmark_has_its_table():
    files = {path.name for path in Path(__file__).parent.glob("test_*.py")} - {Path(__file__).name}
    files |= {f"kvpool bench, {kind}" for kind in ("rows", "engines", "hand-offs")}
    files.add(SHARED)
    marks = re.findall(
        r"<!-- figures of (.+?) -->.+?<!-- end of figures -->", FIGURES.read_text(), re.S
    )
    assert sorted(marks) == sorted(files)
