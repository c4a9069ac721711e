"""Which source ranks hold what a destination needs, and which of them it reads from."""
