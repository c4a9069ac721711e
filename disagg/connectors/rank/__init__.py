"""One rank of a serving engine: its endpoints, its links to prefills, and what it counts."""
