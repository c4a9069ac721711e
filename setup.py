"""Everything is said in pyproject.toml."""

from setuptools import setup

setup()
