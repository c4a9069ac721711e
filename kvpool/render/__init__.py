"""Layouts as tables, memory maps and pictures. Needs no torch."""
