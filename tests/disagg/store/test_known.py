"""What a process remembers of objects is bounded, ends with time, and gives way to what is seen."""

from __future__ import annotations

import time

import pytest

from disagg.store import known
from disagg.store.known import KnownObjects
from tests.disagg.store.growth import entries

KINDS = "there", "damaged"


@pytest.fixture
def objects(monkeypatch):
    monkeypatch.setattr(known, "MOST_NAMES", 10)
    return KnownObjects()


def names_of(objects):
    return sum(entries("objects", objects).values())


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_latest_names_are_kept(objects, kind):
    for number in range(25):
        getattr(objects, kind)(f"object {number}")
    kept = [n for n in range(25) if getattr(objects, f"is_{kind}")(f"object {n}")]
    assert kept == [*range(15, 25)] and names_of(objects) == 10


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_that_comes_again_is_among_the_latest(objects, kind):
    for name in [*"abcdefghij", "a", "k"]:
        getattr(objects, kind)(name)
    assert getattr(objects, f"is_{kind}")("a") and not getattr(objects, f"is_{kind}")("b")


def test_what_was_there_is_so_for_a_while(objects, monkeypatch):
    monkeypatch.setattr(known, "KNOWN_SECONDS", 0.02)
    objects.there("a")
    assert objects.is_there("a")
    time.sleep(0.03)
    assert not objects.is_there("a")
    objects.there("b")
    assert names_of(objects) == 1


def test_the_last_that_was_seen_of_an_object_counts(objects):
    objects.there("a")
    objects.damaged("a")
    assert objects.is_damaged("a") and not objects.is_there("a")
    objects.there("a")
    assert objects.is_there("a") and not objects.is_damaged("a")
    objects.absent(["a", "b"])
    assert not objects.is_there("a") and names_of(objects) == 0
