"""Kedge and llama.cpp's server on one model, by the same HTTP client, in turn (A B A B).

    python -m benchmarks.peers.compare build       # fetches and compiles llama.cpp; again, if time was up
    python -m benchmarks.peers.compare 5m --json 5m.json
    python -m benchmarks.peers.compare 505m --json 505m.json

Sessions have 20 turns of 16 tokens in and 8 out, one session at a time and eight. Kedge keeps them and is sent only
what is new; llama.cpp is sent the whole history and finds it in its cache. A random Llama in bfloat16 is made for both
first. The load is that of serve_overhead.py, with real-time priority for the client if allowed. Kedge is started as
`make serve` does it, with its own Ray cluster.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from benchmarks.peers import llama_server, models

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kedge-peers"
ROOT = Path(__file__).parents[2]
KEDGE_READY_S = 240.0
STOP_S = 60.0
REPLICAS = {"5m": (2, 1), "505m": (1, 2)}
"""Kedge's replicas and the threads of each; llama.cpp has as many threads in total."""


def kedge_config(args: argparse.Namespace, model: Path, folder: Path) -> Path:
    """configs/cluster.yaml with this model."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "configs/cluster.yaml").read_text())
    config["http_options"]["port"] = args.kedge_port
    settings = config["applications"][0]["args"]
    replicas, threads = REPLICAS[args.part]
    settings["model"] |= {"path": str(model), "num_threads": threads}
    settings["replicas"]["count"] = replicas
    settings["controller"]["state_dir"] = str(folder / "state")
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def start_kedge(args: argparse.Namespace, model: Path, folder: Path) -> subprocess.Popen[bytes]:
    shutil.rmtree(folder / "state", ignore_errors=True)
    command = [sys.executable, "-c", "from serving.cli.main import main; main()", "serve"]
    command += [str(kedge_config(args, model, folder)), "--address", "local", *args.serve_arg]
    environment = os.environ | {"RAY_worker_niceness": "0", "PYTHONPATH": str(ROOT)}
    log = folder / "kedge.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    llama_server.wait_until_it_answers(process, f"{kedge_url(args)}/v1/models", KEDGE_READY_S, log)
    return process


def kedge_url(args: argparse.Namespace) -> str:
    return f"http://127.0.0.1:{args.kedge_port}"


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stops the process and waits, since Ray's processes end with the process that started them."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()


def measure(args: argparse.Namespace) -> int:
    sources = (
        llama_server.fetch(args.cache / "sources", args.llama_cpp_python)
        if args.sources is None
        else args.sources
    )
    directory, file = models.make(args.part, args.cache / "models", sources / "gguf-py")
    binary = (args.build_dir or args.cache / "build") / "bin" / "llama-server"
    if not binary.is_file():
        raise SystemExit(f"there is no {binary}: run the part `build` first")
    replicas, threads = REPLICAS[args.part]
    with ExitStack() as stack:
        peer = llama_server.start(
            binary, file, args.llama_port, replicas * threads, args.cache / "llama-server.log"
        )
        stack.callback(stop, peer)
        kedge = start_kedge(args, directory, args.cache)
        stack.callback(stop, kedge)
        command = [sys.executable, "-m", "benchmarks.served.serve_overhead"]
        command += ["--server", f"kedge={kedge_url(args)},session"]
        command += ["--server", f"llama.cpp=http://127.0.0.1:{args.llama_port},resend,{peer.pid}"]
        command += [word for server in args.server for word in ("--server", server)]
        command += ["--rounds", str(args.rounds), "--case", "16 in + 8 out", "--endpoint", "completions"]
        command += ["--no-keep-alive"]  # llama.cpp's server promises to keep connections, but closes them
        command += ["--max-other-cores", str(args.max_other_cores)]
        command += ["--max-burst-share", "1"] if args.part == "5m" else []
        command += ["--json", str(args.json)] if args.json is not None else []
        return subprocess.run(
            [*with_priority(), *command], env=os.environ | {"PYTHONPATH": str(ROOT)}
        ).returncode


def with_priority() -> list[str]:
    """Command prefix for the client, which shares the cores with the servers (benchmarks/README.md)."""
    chrt = shutil.which("chrt")
    allowed = (
        chrt is not None and subprocess.run([chrt, "-f", "50", "true"], capture_output=True).returncode == 0
    )
    if not allowed:
        sys.stderr.write("no real-time priority for the client: it may be late\n")
    return [str(chrt), "-f", "50"] if allowed else []


def build(args: argparse.Namespace) -> int:
    sources = (
        llama_server.fetch(args.cache / "sources", args.llama_cpp_python)
        if args.sources is None
        else args.sources
    )
    try:
        binary = llama_server.build(
            sources, args.build_dir or args.cache / "build", args.jobs, args.build_time_s
        )
    except subprocess.TimeoutExpired:
        sys.stderr.write("time is up; the next run goes on where this one stopped\n")
        return 1
    sys.stdout.write(f"{binary}\n")
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["build", *models.SHAPES])
    parser.add_argument("--cache", type=Path, default=CACHE, help="sources, build, models and logs")
    parser.add_argument("--sources", type=Path, help="llama.cpp, if it is here already")
    parser.add_argument("--build-dir", type=Path, help="of llama.cpp, in place of one in the cache")
    parser.add_argument(
        "--llama-cpp-python", default="", metavar="VERSION", help="whose sources; the newest if left out"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--build-time-s", type=float, default=570.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kedge-port", type=int, default=18000)
    parser.add_argument("--llama-port", type=int, default=18080)
    parser.add_argument("--serve-arg", action="append", default=[], metavar="ARG", help="of `kedge serve`")
    parser.add_argument(
        "--server", action="append", default=[], metavar="NAME=URL,MODE[,PID]",
        help="one more that is up and has the model, such as vLLM",
    )  # fmt: skip
    parser.add_argument(
        "--max-other-cores", type=float, default=0.2, help="the other server's idle work counts, too"
    )
    parser.add_argument("--json", type=Path, help="runs are added to those that the file has")
    args = parser.parse_args()
    args.cache.mkdir(parents=True, exist_ok=True)
    sys.exit(build(args) if args.part == "build" else measure(args))


if __name__ == "__main__":
    main()
