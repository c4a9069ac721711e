"""Connectors that serving engines load, one folder an engine."""
