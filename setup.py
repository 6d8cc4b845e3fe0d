"""Builds the kernels for processors (engine/cpu/source/), once for each kind of processor of this architecture.

They are no Python modules: engine/cpu/library.py loads the best that runs. What does not compile is left out, and
torch's operators do the work.
"""

from __future__ import annotations

import copy
import hashlib
import platform
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("engine/cpu/source")
PROCESSOR = FOLDER / "processor.c"
"""Says which builds run here, so nothing of a kind of processor is in it."""

AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
AVX512_BF16 = [*AVX512, "-mavx512bf16"]
AMX = [*AVX512_BF16, "-mamx-tile", "-mamx-bf16"]
FLAGS = {
    "x86_64": {"avx2": AVX2, "avx512": AVX512, "avx512bf16": AVX512_BF16, "amx": AMX},
    "aarch64": {"neon": []},
    "arm64": {"neon": []},
}
COMMON = [
    "-std=c11",
    "-O3",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-strict-aliasing",
    "-fvisibility=hidden",
]


class BuildEach(build_ext):
    """Builds of the same files, at the same time: each has a folder for its objects."""

    def build_extension(self, ext: Extension) -> None:
        apart = copy.copy(self)
        apart.build_temp = str(Path(self.build_temp) / ext.name)
        build_ext.build_extension(apart, ext)


def extensions() -> list[Extension]:
    variants = FLAGS.get(platform.machine(), {})
    files = sorted(path for path in FOLDER.glob("*") if path.suffix in (".c", ".h"))
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:16]
    kernels = [path for path in files if path.suffix == ".c" and path != PROCESSOR]
    builds = {"processor": ([PROCESSOR], [])} if variants else {}
    builds |= {variant: (kernels, flags) for variant, flags in variants.items()}
    return [
        Extension(
            f"engine.cpu._{name}",
            [str(path) for path in sources],
            depends=[str(path) for path in files],
            define_macros=[("KEDGE_SOURCES", f'"{digest}"')],
            extra_compile_args=[*COMMON, *flags],
            extra_link_args=["-lm", "-pthread"],
            optional=True,
        )
        for name, (sources, flags) in builds.items()
    ]


if sys.platform == "win32":
    sys.exit("Kedge cannot be installed on Windows, where it does not run. Install it on Linux, or in WSL 2.")

setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildEach},
    options={"build_ext": {"parallel": True}},
)
