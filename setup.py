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
                "slow while the program's main thread is busy, and so are quantised rows on the "
                "CPU. `kvpool doctor` shows it."
            )


def compiled(name, sources, depends=()):
    """An extension with no Python inside, so that one file serves every release from 3.10 on."""
    return Extension(
        name,
        sources,
        depends=list(depends),
        # every result of float32 is rounded, as torch does; no loop needs its exceptions
        extra_compile_args=[
            *("-O3", "-std=gnu11", "-pthread", "-ffp-contract=off", "-fno-trapping-math")
        ],
        # without symbols for debuggers: a quarter of the size
        extra_link_args=["-pthread", "-Wl,-s"],
        py_limited_api=True,
        optional=True,
    )


COMPILED = [
    compiled(
        "kvpool._native.runs",
        ["kvpool/_native/runs.c", "kvpool/_native/rows.c", "kvpool/_native/convert.c"],
        ["kvpool/_native/blocks.h", "kvpool/_native/rows.h", "kvpool/_native/stream.h"],
    ),
]


setup(
    ext_modules=COMPILED if sys.platform == "linux" else [],
    cmdclass={"build_ext": BuildOrWarn},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
