"""The `kvpool` command, also as `python -m kvpool`."""

import sys

from kvpool.extras import missing, require


def main() -> None:
    """Runs the command line. A package of an extra that is not installed is one sentence."""
    what = " ".join(["kvpool", *sys.argv[1:2]])
    try:
        for package in ("typer", "rich"):
            require(what, package)
        from kvpool.cli import main as run

        run()
    except ModuleNotFoundError as error:
        found = missing(what, error)
        if found is error:
            raise
        sys.exit(str(found))


if __name__ == "__main__":
    main()
