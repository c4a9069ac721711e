"""State in a form that does not depend on how a pool keeps it, and copies to it and from it."""
