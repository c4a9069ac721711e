"""Prefills are found through a directory, with no server."""

from __future__ import annotations

import threading

import pytest

from disagg.runtime.discovery import discover, prefills, publish


def test_ranks_are_found_in_order_once_all_are_there(tmp_path):
    publish(tmp_path, "p0", rank=1, ranks=2, address="tcp://10.0.0.1:2")
    publish(tmp_path, "other", rank=0, ranks=1, address="tcp://10.0.0.9:9")
    late = threading.Timer(
        0.2, publish, (tmp_path, "p0"), {"rank": 0, "ranks": 2, "address": "tcp://10.0.0.1:1"}
    )
    late.start()
    assert discover(tmp_path, "p0", timeout=20) == ["tcp://10.0.0.1:1", "tcp://10.0.0.1:2"]
    assert prefills(tmp_path) == ["other", "p0"]


def test_a_rank_that_comes_again_is_found_at_its_new_address(tmp_path):
    for port in (1, 2):
        publish(tmp_path, "p", rank=0, ranks=1, address=f"tcp://10.0.0.1:{port}")
    assert discover(tmp_path, "p") == ["tcp://10.0.0.1:2"]


def test_missing_ranks_are_named(tmp_path):
    with pytest.raises(TimeoutError, match="rank 0 of prefill 'p' is not there after 0 s"):
        discover(tmp_path / "nowhere", "p")
    publish(tmp_path, "p", rank=1, ranks=3, address="tcp://10.0.0.1:1")
    with pytest.raises(TimeoutError, match="rank 0, 2 of prefill 'p'"):
        discover(tmp_path, "p", timeout=0.1)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"prefill": "../p"}, "a name of letters"),
        ({"rank": 2}, "rank 2 of 2: from 0 to 1"),
        ({"address": "tcp://0.0.0.0:77"}, "no other host can dial that"),
    ],
)
def test_what_nobody_could_use_is_not_published(tmp_path, given, sentence):
    good = {"prefill": "p", "rank": 0, "ranks": 2, "address": "tcp://10.0.0.1:1"}
    with pytest.raises(ValueError, match=sentence):
        publish(tmp_path, **{**good, **given})
    assert not list(tmp_path.iterdir())


def test_files_that_are_none_and_lives_that_disagree_are_named(tmp_path):
    publish(tmp_path, "p", rank=0, ranks=2, address="tcp://10.0.0.1:1")
    publish(tmp_path, "p", rank=1, ranks=4, address="tcp://10.0.0.1:1")
    with pytest.raises(ValueError, match=r"give different numbers of ranks \(2, 4\)"):
        discover(tmp_path, "p")
    (tmp_path / "q.0.json").write_text("{")
    with pytest.raises(ValueError, match=r"q\.0\.json: .*publish the rank again"):
        discover(tmp_path, "q")
