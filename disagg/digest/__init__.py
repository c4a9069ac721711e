"""Digests of live bytes, for both sides of a transfer to compare."""
