"""docs/operations.md lists every setting and metric that the code has, and no others."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel

from serving.settings.config import AppArgs
from serving.settings.replica_args import AutoscalingArgs

PAGE = (Path(__file__).parents[4] / "docs" / "operations.md").read_text()


def first_cells(prefix: str) -> set[str]:
    """The names in backticks in the first cells of the page's table rows."""
    cells = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith(("| `", "| [`"))]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell) if name.startswith(prefix)}


def leaves(section: str, model: type[BaseModel]) -> set[str]:
    names = set()
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            names |= leaves(f"{section}.{name}", kind)
        else:
            names.add(f"{section}.{name}")
    return names


def setting_names() -> set[str]:
    names = set()
    for section, field in AppArgs.model_fields.items():
        assert isinstance(field.annotation, type)
        assert issubclass(field.annotation, BaseModel)
        names |= leaves(section, field.annotation)
    return names | {f"replicas.autoscaling.{name}" for name in AutoscalingArgs.model_fields}


def test_every_setting_is_in_the_table_and_nothing_else():
    listed = {name for name in first_cells("") if "." in name}
    assert listed == setting_names()


def test_every_alert_is_in_the_table():
    rules = (Path(__file__).parents[4] / "configs" / "monitoring" / "alerts.yml").read_text()
    alerts = set(re.findall(r"alert: (\w+)", rules))
    assert alerts == first_cells("Kedge")
