"""Pictures of the site, which commands of kvpool draw while it is built."""

import os
import re
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LANDING = "kvpool describe deepseek_v3 --packing fp8 --svg deepseek_v3.svg"
COMMANDS = {
    "index.md": [LANDING],
    # as these pages have them
    "commands.md": [
        "kvpool describe deepseek_v4 --packing fp8 --html map.html",
        "kvpool explain llama_3_1_70b --tp 8:4 --link 400Gb --html plan.html",
    ],
    "performance.md": ["kvpool demo --timeline rooms.html"],
}
"""By page; the last word of each is the file that it writes."""
FOLDER = "pictures"


def draw(folder: Path) -> list[Path]:
    """Runs all commands in a folder, and returns their files. The environment variable KVPOOL is
    the program, if it is not on the path. Raises RuntimeError with what a command says.
    """
    folder.mkdir(parents=True, exist_ok=True)
    commands = [command for commands in COMMANDS.values() for command in commands]
    with ThreadPoolExecutor() as threads:
        return list(threads.map(lambda command: _drawn(command, folder), commands))


def _drawn(command: str, folder: Path) -> Path:
    program = os.environ.get("KVPOOL", "kvpool")
    words = [program, *shlex.split(command)[1:]]
    try:
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    except OSError as error:
        raise RuntimeError(
            f"{command}: {program}: {error.strerror}. Use `make docs`, or say in KVPOOL where the "
            "command is."
        ) from None
    if done.returncode:
        raise RuntimeError(f"{command}: exit status {done.returncode}: {done.stderr.strip()}")
    return folder / words[-1]


def with_pictures(page: str, markdown: str) -> str:
    """A page with the picture of each of its commands behind the block or paragraph that has it."""
    for command in reversed(COMMANDS.get(page, [])):  # of one block the first comes first
        place = re.search(
            rf"^(```\n(?:.+\n)*)?.*{re.escape(command)}.*\n((?:.+\n)*)", markdown, re.M
        )
        if place is None:
            raise RuntimeError(
                f"docs/{page} has no command `{command}`, of which it has a picture."
            )
        before, after = markdown[: place.end()], markdown[place.end() :]
        markdown = f"{before}\n{figure(command)}\n{after}"
    return markdown


def figure(command: str) -> str:
    """A picture with the command below it; a page in a frame of its own."""
    path = f"{FOLDER}/{command.split()[-1]}"
    if path.endswith(".svg"):
        picture = f'<a href="{path}"><img src="{path}" alt="What the command draws"></a>'
    else:
        picture = f'<iframe src="{path}" title="{command}"></iframe>'
    caption = f'<figcaption><a href="{path}">{command}</a></figcaption>'
    return f'<figure class="drawn">{picture}{caption}</figure>\n'
