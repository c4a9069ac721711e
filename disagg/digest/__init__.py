"""Digests of live bytes, which both sides of a transfer compare."""
