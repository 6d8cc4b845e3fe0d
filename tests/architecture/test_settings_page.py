"""docs/settings.md agrees with the models, which say what each setting does, and lists every variable that is read."""

from __future__ import annotations

import importlib.util
import re
from typing import Any, TypeGuard, get_args

from pydantic import BaseModel
from source_tree import PACKAGES, ROOT, sources

from serving.settings.config import AppArgs

SENTENCES = re.compile(r"[A-Z`\[].*\.", re.DOTALL)


def is_section(kind: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def models(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The model and all below it, by their names, those that may be left out included."""
    found = {model.__name__: model}
    for field in model.model_fields.values():
        for kind in (field.annotation, *get_args(field.annotation)):
            if is_section(kind):
                found |= models(kind)
    return found


def test_the_page_is_that_of_the_models() -> None:
    spec = importlib.util.spec_from_file_location("settings", ROOT / "docs" / "settings.py")
    assert spec is not None
    assert spec.loader is not None
    settings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(settings)
    assert settings.PAGE.read_text() == settings.page(), "python docs/settings.py writes it anew"


def test_every_setting_says_what_it_does() -> None:
    """In sentences, at its field; a section says it in its docstring."""
    untold = [
        f"{name}.{key}"
        for name, model in models(AppArgs).items()
        for key, field in model.model_fields.items()
        if not (is_section(field.annotation) or SENTENCES.fullmatch(field.description or ""))
    ]
    assert untold == []
    assert [
        name for name, model in models(AppArgs).items() if not SENTENCES.fullmatch(model.__doc__ or "")
    ] == []


def test_every_variable_of_the_environment_is_listed() -> None:
    listed = set(re.findall(r"^\| `(KEDGE_\w+)`", (ROOT / "docs" / "settings.md").read_text(), re.MULTILINE))
    read = {name for source in sources(*PACKAGES) for name in re.findall(r'"(KEDGE_[A-Z_]+)"', source.text)}
    assert listed == read
