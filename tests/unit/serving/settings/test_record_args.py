"""The settings of traces and logs, and what is reported missing where traces cannot be sent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from serving.settings.config import parse_args
from serving.settings.record_args import TracingArgs
from serving.settings.strict_settings import SettingsError

ROOT = Path(__file__).parents[4]
MODEL = {"path": "assets/models/kedge-chat"}
NO_EXPORTER = """
import sys
from importlib.abc import MetaPathFinder

class Hidden(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "opentelemetry.exporter.otlp.proto":
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Hidden())
"""


@pytest.mark.parametrize(
    ("section", "values", "reason"),
    [
        ("tracing", {"endpont": "http://a:4318"}, "unknown key 'endpont'; did you mean 'endpoint'?"),
        ("tracing", {"endpoint": "collector:4318"}, "args.tracing.endpoint"),
        ("tracing", {"endpoint": "http://me:secret@c:4318"}, "OTEL_EXPORTER_OTLP_HEADERS"),
        ("tracing", {"sample_ratio": 1.5}, "args.tracing.sample_ratio"),
        ("logs", {"format": "xml"}, "args.logs.format"),
        ("logs", {"acces": "all"}, "unknown key 'acces'; did you mean 'access'?"),
    ],
)
def test_what_is_wrong_is_named(section: str, values: dict[str, Any], reason: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_args({"model": MODEL, section: values})
    assert reason in str(caught.value)


@pytest.mark.parametrize("endpoint", ["http://c:4318", "http://c:4318/", "http://c:4318/v1/traces"])
def test_spans_go_to_the_collectors_path_for_them(endpoint: str) -> None:
    assert TracingArgs(endpoint=endpoint).traces_url == "http://c:4318/v1/traces"


def test_a_collector_behind_a_path_keeps_it() -> None:
    args = TracingArgs(endpoint="https://langfuse.example/api/public/otel")
    assert args.traces_url == "https://langfuse.example/api/public/otel/v1/traces"


def test_where_the_exporter_is_missing_nothing_starts_and_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_EXPORTER)
    document = yaml.safe_load((ROOT / "configs" / "cluster.yaml").read_text())
    document["applications"][0]["args"]["tracing"] = {"endpoint": "http://127.0.0.1:4318"}
    config = tmp_path / "cluster.yaml"
    config.write_text(yaml.safe_dump(document))
    serve = [sys.executable, "-c", "from serving.cli.main import main; main()", "serve", str(config)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        serve, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("kedge serve: ")
    assert "args.tracing.endpoint: traces need a package" in done.stderr
    assert ".venv/bin/pip install -e '.[tracing]'" in done.stderr
