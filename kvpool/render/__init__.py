"""Layouts for people: tables, memory maps, pictures. No torch, no command line."""
