"""Fixtures: floors of every kind; Mooncake's where its package is installed."""

from __future__ import annotations

import os
from contextlib import ExitStack
from importlib.util import find_spec
from uuid import uuid4

import pytest

from disagg.store.floors import open_floor
from tests.disagg.store.servers import CREDENTIALS, S3Server, serving

HERE = find_spec("mooncake") is not None
KINDS = "memory", "file", "s3", *(["mooncake"] if HERE else [])


@pytest.fixture(autouse=True)
def process_variables():
    """Mooncake's are for the whole process: other tests find none."""
    before = {*os.environ}
    yield
    for name in [name for name in os.environ if name.startswith("MC_") and name not in before]:
        del os.environ[name]


@pytest.fixture(scope="session")
def floor_servers():
    """URLs by kind; a server runs from the first test that needs it to the last."""
    with ExitStack() as stack:
        urls: dict[str, str] = {}

        def url(kind, folder):
            if kind == "s3" and kind not in urls:
                server = S3Server()
                stack.enter_context(server.running())
                urls[kind] = server.url("a/prefix")
            if kind == "mooncake" and kind not in urls:
                _, fields = stack.enter_context(serving("--memory", "512MiB"))
                urls[kind] = fields["url"]
            own = {"memory": f"memory://{uuid4().hex}", "file": f"file://{folder}"}
            return urls.get(kind) or own[kind]

        yield url


@pytest.fixture(params=KINDS)
def floor_url(request, floor_servers, tmp_path, monkeypatch):
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    return floor_servers(request.param, tmp_path / "objects")


@pytest.fixture
def space():
    """A first part of names that no other test has."""
    return uuid4().hex


@pytest.fixture
def floor(floor_url, space):
    floor = open_floor(floor_url)
    yield floor
    floor.delete([listed.name for listed in floor.list(space)])
    floor.close()


@pytest.fixture
def other_floor(floor_url, floor):
    """Another client of the same place."""
    floor = open_floor(floor_url)
    yield floor
    floor.close()
