"""A fleet that is replaced process by process, while it serves."""
