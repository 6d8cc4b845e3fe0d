"""Commands and paths of benchmarks, in documents and in code, name scripts that are there."""

from __future__ import annotations

import re

from source_tree import ROOT, sources

DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]
COMMAND = re.compile(r"-m[\s\",]+(benchmarks(?:\.\w+)+)")
PATH = re.compile(r"\b(benchmarks/[\w/]+\.py)\b")


def test_named_scripts_are_there() -> None:
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in DOCUMENTS}
    texts |= {source.name: source.text for source in sources("benchmarks", "tests")}
    named = [
        (place, name.replace(".", "/") + ".py")
        for place, text in texts.items()
        for name in COMMAND.findall(text)
    ]
    assert len(named) > 40
    named += [(place, name) for place, text in texts.items() for name in PATH.findall(text)]
    assert [(place, name) for place, name in named if not (ROOT / name).is_file()] == []
