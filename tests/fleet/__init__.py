"""A fleet of endpoints in one process, under a clock of its own: docs/scale.md."""
