"""One browser for all pictures; where there is none, they are not collected."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.pictures.browser import browser, program

collect_ignore = (
    [] if program() and find_spec("websockets") else ["test_pictures.py", "test_map.py"]
)


def pytest_report_header(config: pytest.Config) -> list[str]:
    lacking = (
        "no Chromium or no package websockets: apt-get install chromium-headless-shell, or make"
    )
    return [f"pictures are not looked at ({lacking})"] if collect_ignore else []


@pytest.fixture(scope="session")
def page(tmp_path_factory):
    """A page of a browser."""
    with browser(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture(scope="session")
def folder(request, tmp_path_factory) -> Path:
    """Where pictures and screenshots are kept."""
    given = request.config.getoption("--screenshots")
    path = Path(given) if given else tmp_path_factory.mktemp("pictures")
    path.mkdir(parents=True, exist_ok=True)
    return path.absolute()
