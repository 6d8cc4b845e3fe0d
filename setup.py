"""Builds the kernels for processors (engine/cpu/source/), once for each kind of processor of this architecture.

They are no Python modules: engine/cpu/library.py loads the best that runs. What does not compile is left out, and
torch's operators do the work.
"""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

from setuptools import Extension, setup

FOLDER = Path("engine/cpu/source")
AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
FLAGS = {
    "x86_64": {"avx2": AVX2, "avx512": AVX512, "avx512bf16": [*AVX512, "-mavx512bf16"]},
    "aarch64": {"neon": []},
    "arm64": {"neon": []},
}
COMMON = [
    "-std=c11",
    "-O3",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
]


def kernels() -> list[Extension]:
    files = sorted(path for path in FOLDER.glob("*") if path.suffix in (".c", ".h"))
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:16]
    return [
        Extension(
            f"engine.cpu._{variant}",
            [str(path) for path in files if path.suffix == ".c"],
            depends=[str(path) for path in files],
            define_macros=[("KEDGE_SOURCES", f'"{digest}"')],
            extra_compile_args=[*COMMON, *flags],
            extra_link_args=["-lm", "-pthread"],
            optional=True,
        )
        for variant, flags in FLAGS.get(platform.machine(), {}).items()
    ]


setup(ext_modules=kernels(), options={"build_ext": {"parallel": True}})
