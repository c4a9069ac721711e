"""The `kvpool` command, also as `python -m kvpool`."""

import sys

from kvpool.extras import MissingExtra, require


def main() -> None:
    """Runs the command line. What a command needs and is not installed is one sentence."""
    try:
        for package in ("typer", "rich"):
            require("the command kvpool", package)
        from kvpool.cli import main as run

        run()
    except MissingExtra as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
