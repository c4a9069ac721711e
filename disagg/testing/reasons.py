"""Why a server did not serve, from its log: the connector's own words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

PREFIX = re.compile(
    r"^(?:\([\w.]+(?: pid=\d+)?\) *)?"  # vLLM: the process
    r"(?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:.]+ \[[^\]]*\] ?)?"
    r"(?:\[\d{4}-[\d: -]+[^\]]*\] ?)?"  # SGLang: the time and the rank
    r"(?:(?:\d{4}-[\d:. -]+)?(?:NIXL|LMCache) (?P<library>[A-Z]+):? +)?"
)
NAME = re.compile(r"(?:cmpl-)?conform-\d+(?:-\d+-[0-9a-f]+)?")
"""A request's, another one each time."""
STACK = "Traceback", "  File ", "    "
COLOUR = re.compile(r"\x1b\[[\d;]*m")
EXCEPTION = re.compile(
    r"^(?:(?:[a-z_]\w*\.)+(?P<dotted>[A-Z]\w+|\w*Error)|(?P<plain>\w*(?:Error|Exception)))"
    r": (?P<words>.+)"
)
GENERAL = (
    "Engine core initialization failed",
    "WorkerProc initialization failed",
    "WorkerProc failed to start",
    "Failed core proc",
    "EngineDeadError",
    "EngineCore encountered an issue",
    "Broken pipe",
    "died unexpectedly",
    "output_handler failed",
    "failed with an internal error",
)
"""What a process says of another whose log is here too."""
LEVELS = "ERROR", "CRITICAL"
LINES = 12
"""Of one reason."""


def exceptions(text: str) -> list[str]:
    """`Name: message` of each traceback in a log, in order. A message may have several lines."""
    lines = [PREFIX.sub("", line) for line in COLOUR.sub("", text).splitlines()]
    messages = []
    for number, line in enumerate(lines):
        match = EXCEPTION.match(line)
        if match and not any(words in line for words in GENERAL):
            name = match["dotted"] or match["plain"]
            following = _following(lines[number + 1 :])
            messages.append("\n".join([f"{name}: {match['words']}", *following]))
    return messages


def errors(text: str) -> list[str]:
    """What a log has at level ERROR and above, once each."""
    messages: dict[str, None] = {}
    for line in COLOUR.sub("", text).splitlines():
        match = PREFIX.match(line)
        assert match  # every part of it may be missing
        level = match["level"] or match["library"]
        message = NAME.sub("conform", line[match.end() :])
        stack = message.startswith(STACK)
        if level in LEVELS and not stack and not any(words in message for words in GENERAL):
            messages.setdefault(message)
    return [*messages]


def of_start(text: str) -> str:
    """Why a server did not start: its last exception that is not about another process."""
    messages = exceptions(text)
    return messages[-1] if messages else last_lines(text)


def of_requests(texts: Iterable[str], failures: Sequence[str]) -> str:
    """Why requests failed: the first exception in the logs, else the first error, else what was
    answered.
    """
    logs = [*texts]
    for words in (exceptions, errors):
        lines = [line for text in logs for message in words(text) for line in message.splitlines()]
        if lines:
            return "\n".join([lines[0], *_following(lines[1:])])
    return "\n".join([*dict.fromkeys(failures)][:LINES])


def last_lines(text: str) -> str:
    """The end of a log."""
    return "\n".join([line for line in text.splitlines() if line.strip()][-LINES:])


def _following(lines: Sequence[str]) -> list[str]:
    """Further lines of a message: those that are indented as our refusals are."""
    further = []
    for line in lines[: LINES - 1]:
        if not line.startswith("  ") or line.startswith("  File "):
            break
        further.append(line)
    return further
