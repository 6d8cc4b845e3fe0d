"""docs/transcripts.py refreshes the real output in the documents from a running server."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from source_tree import ROOT

API_PAGES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "api").glob("*.md"))
WITH_EXAMPLES = ["README.md", "docs/api.md", *API_PAGES, "docs/cli.md", "docs/first-steps.md"]
PAGE = """Text.

<!-- transcript -->
```console
$ name=Rex; echo "my dog \\
    is $name"
old output
$ echo $name $KEDGE_URL
$ echo 'quoted
  twice'
quoted
  twice
```

```console
$ false: not an example
```
"""


@pytest.fixture
def transcripts():
    spec = importlib.util.spec_from_file_location("transcripts", ROOT / "docs" / "transcripts.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("transcripts", None)


def test_outputs_are_replaced_and_everything_else_stays(transcripts):
    page = transcripts.refreshed(PAGE, "http://x:1")
    assert page == PAGE.replace("old output", "my dog     is Rex").replace(
        "$ echo $name $KEDGE_URL\n", "$ echo $name $KEDGE_URL\nRex http://127.0.0.1:8000\n"
    )
    assert transcripts.refreshed(page, "http://x:1") == page


def test_a_command_that_fails_ends_the_refresh(transcripts):
    with pytest.raises(SystemExit, match="status 3 of: exit_with_3"):
        transcripts.run_all(["exit_with_3() { return 3; }", "exit_with_3"], "http://x:1")


@pytest.mark.parametrize("document", WITH_EXAMPLES)
def test_every_example_has_output(transcripts, document):
    """Every block has at least one line of output. Without one, somebody forgot to refresh it."""
    for match in transcripts.BLOCK.finditer((ROOT / document).read_text()):
        commands = "".join(f"$ {command}\n" for command in transcripts.commands_of(match[2]))
        assert match[2] != commands, f"{document}: no output for\n{commands}"
