"""The `kvpool` command, also as `python -m kvpool`."""

import sys

from kvpool.extras import MissingExtra, needed_by


def main() -> None:
    """Runs the command line. A package of an extra that is not installed is one sentence."""
    try:
        with needed_by(" ".join(["kvpool", *sys.argv[1:2]])):
            import rich as rich  # which commands import when they print

            from kvpool.cli import app

            app()
    except MissingExtra as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
