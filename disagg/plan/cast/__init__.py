"""Rows that prefill holds in one format and decode in another."""
