"""`python -m kvpool`: the `kvpool` command."""

from kvpool.cli import main

main()
