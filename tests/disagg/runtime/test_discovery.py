"""Prefills are found through a directory, with no server."""

from __future__ import annotations

import json
import os
import stat
import threading

import pytest

from disagg.runtime.discovery import discover, prefills, publish

OTHER_USER = 65534
HERE = "tcp://10.0.0.1:1"


@pytest.fixture(autouse=True)
def folder(tmp_path):
    """What others may write to is refused, whatever this process's umask is."""
    tmp_path.chmod(0o755)


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


def test_a_folder_that_is_made_is_its_users_alone(tmp_path):
    publish(tmp_path / "new", "p", rank=0, ranks=1, address=HERE)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert discover(tmp_path / "new", "p") == [HERE]


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
def test_a_folder_that_others_may_write_to_is_not_used(tmp_path, mode):
    publish(tmp_path, "p", rank=0, ranks=1, address=HERE)
    tmp_path.chmod(mode)
    for call in (
        lambda: publish(tmp_path, "p", rank=0, ranks=1, address=HERE),
        lambda: discover(tmp_path, "p", timeout=5),
    ):
        sentence = rf"user \d+ owns it, its mode is {mode:04o}: other users may write to it"
        with pytest.raises(ValueError, match=f"{sentence}. Run: chmod go-w {tmp_path}"):
            call()


def test_a_file_that_others_may_write_to_is_not_believed(tmp_path):
    publish(tmp_path, "p", rank=0, ranks=1, address=HERE)
    (tmp_path / "p.0.json").chmod(0o646)
    with pytest.raises(ValueError, match=r"p\.0\.json: .*0646: other users may write to it"):
        discover(tmp_path, "p")


@pytest.mark.root
@pytest.mark.parametrize("what", ["", "p.0.json"])
def test_what_another_user_owns_is_not_believed(tmp_path, what):
    publish(tmp_path, "p", rank=0, ranks=1, address=HERE)
    os.chown(tmp_path / what, OTHER_USER, -1)
    with pytest.raises(ValueError, match=rf"user {OTHER_USER} owns it.*Run: chown 0"):
        discover(tmp_path, "p")


def test_a_planted_link_is_not_written_through(tmp_path):
    """A folder of /tmp, once: whoever guessed the process's id chose the file that was written."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / f".p.0.{os.getpid()}").symlink_to(victim)
    (folder / "p.0.json").symlink_to(victim)
    publish(folder, "p", rank=0, ranks=1, address=HERE)
    assert victim.read_text() == "precious"
    assert not (folder / "p.0.json").is_symlink()
    assert discover(folder, "p") == [HERE]


def test_links_are_not_followed(tmp_path):
    publish(tmp_path / "real", "p", rank=0, ranks=1, address=HERE)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for call in (
        lambda: publish(tmp_path / "link", "p", rank=0, ranks=1, address=HERE),
        lambda: discover(tmp_path / "link", "p"),
    ):
        with pytest.raises(ValueError, match="link: a symbolic link is not followed"):
            call()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text(json.dumps({"prefill": "q", "rank": 0, "ranks": 1, "address": HERE}))
    (tmp_path / "real" / "q.0.json").symlink_to(elsewhere)
    with pytest.raises(ValueError, match=r"q\.0\.json: a symbolic link is not followed"):
        discover(tmp_path / "real", "q")


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "p.0.json", 0o600)
    with pytest.raises(ValueError, match="no regular file"):
        discover(tmp_path, "p")
