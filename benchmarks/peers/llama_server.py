"""llama.cpp's server, built from the sources in the sdist of llama-cpp-python on PyPI."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import httpx

PACKAGE = "llama-cpp-python"
READY_S = 60.0
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_CURL": "OFF",
    "LLAMA_OPENSSL": "OFF",
}


def fetch(folder: Path, version: str) -> Path:
    """The folder of llama.cpp's sources, fetched from PyPI if missing. `version` is the package's version, or empty."""
    found = sorted(folder.glob("*/vendor/llama.cpp"))
    if found:
        return found[-1]
    folder.mkdir(parents=True, exist_ok=True)
    wanted = f"{PACKAGE}=={version}" if version else PACKAGE
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", PACKAGE]
    subprocess.run([*command, "--dest", str(folder), wanted], check=True)
    (archive,) = folder.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as sources:
        sources.extractall(folder, filter="data")
    return next(folder.glob("*/vendor/llama.cpp"))


def build(sources: Path, folder: Path, jobs: int, time_s: float) -> Path:
    """The path of the server's binary. Compiled parts are kept, so another call goes on after a TimeoutExpired."""
    binary = folder / "bin" / "llama-server"
    if not binary.is_file():
        defines = [f"-D{name}={value}" for name, value in OPTIONS.items()]
        subprocess.run(["cmake", "-S", str(sources), "-B", str(folder), *defines], check=True)
        command = ["cmake", "--build", str(folder), "--target", "llama-server", "--parallel", str(jobs)]
        subprocess.run(command, check=True, timeout=time_s)
    return binary


def start(binary: Path, model: Path, port: int, threads: int, log: Path) -> subprocess.Popen[bytes]:
    """Starts the server; it answers when this returns. Eight slots, each with room for a whole session."""
    command = [str(binary), "--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += [
        "--threads",
        str(threads),
        "--threads-http",
        "2",
        "--parallel",
        "8",
        "--ctx-size",
        str(8 * 2048),
    ]
    environment = os.environ | {"LD_LIBRARY_PATH": str(binary.parent)}
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    wait_until_it_answers(process, f"http://127.0.0.1:{port}/health", READY_S, log)
    return process


def wait_until_it_answers(process: subprocess.Popen[bytes], url: str, time_s: float, log: Path) -> None:
    """Waits until the server answers. Raises SystemExit if it ends before that or takes too long."""
    end_s = time.monotonic() + time_s
    while time.monotonic() < end_s and process.poll() is None:
        try:
            if httpx.get(url, timeout=2.0).is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    process.kill()
    raise SystemExit(f"{process.args!r} did not answer: {log}")
