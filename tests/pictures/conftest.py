"""One browser for all pictures; where there is none, they are not collected."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.pictures.browser import browser, program

HERE = program() is not None and find_spec("websockets") is not None
collect_ignore = [] if HERE else ["test_pictures.py"]


@pytest.fixture(scope="session")
def page(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture(scope="session")
def folder(request, tmp_path_factory) -> Path:
    """Where pictures and screenshots are kept."""
    given = request.config.getoption("--screenshots")
    path = Path(given) if given else tmp_path_factory.mktemp("pictures")
    path.mkdir(parents=True, exist_ok=True)
    return path.absolute()
