"""Everything but the C code is said in pyproject.toml. Where that cannot be compiled, kvpool is
installed without it and does the same in Python.
"""

import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class BuildOrWarn(build_ext):
    """Says what goes missing if there is no compiler."""

    def build_extension(self, ext):
        try:
            super().build_extension(ext)
        except Exception as error:  # what a missing or broken compiler raises differs
            self.warn(
                f"{ext.name} was NOT compiled ({error}). kvpool works without it; transfers are "
                "slow while the program's main thread is busy. `kvpool doctor` shows it."
            )


SOURCES = ["kvpool/_native/runs.c", "disagg/plan/native/bind.c"]


def compiled(source):
    """An extension with no Python inside, so that one file serves every release from 3.10 on."""
    return Extension(
        source.removesuffix(".c").replace("/", "."),
        [source],
        extra_compile_args=["-O2", "-std=gnu11", "-pthread"],
        extra_link_args=["-pthread"],
        py_limited_api=True,
        optional=True,
    )


setup(
    ext_modules=[compiled(each) for each in SOURCES] if sys.platform == "linux" else [],
    cmdclass={"build_ext": BuildOrWarn},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
