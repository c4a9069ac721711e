"""Fixtures of several tests."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from unittest import mock

import pytest

from disagg import SocketTransport
from disagg.runtime.keys import write_keys
from disagg.runtime.sockets.tls import open_keys


@pytest.fixture(scope="session")
def keys(tmp_path_factory):
    """The folder of a deployment's keys. Nothing may change it."""
    folder = tmp_path_factory.mktemp("keys") / "keys"
    write_keys(folder)
    return folder


@pytest.fixture(scope="session")
def other_keys(tmp_path_factory):
    """Those of another deployment."""
    folder = tmp_path_factory.mktemp("keys") / "other"
    write_keys(folder)
    return folder


@pytest.fixture
def transports(keys):
    """Makes transports, of the `side` of a deployment or without keys, and closes them."""
    with ExitStack() as stack:

        def make(side=None, insecure=True):
            credentials = None if side is None else open_keys(keys, side)
            transport = SocketTransport(insecure and side is None, credentials)
            stack.callback(transport.close)
            return transport

        yield make


@pytest.fixture
def another_mooncake(monkeypatch, tmp_path):
    """The folder of an empty package of Mooncake's name, which is forgotten afterwards."""
    folder = tmp_path / "mooncake"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with mock.patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.partition(".")[0] == "mooncake"]:
            del sys.modules[name]
        yield folder
