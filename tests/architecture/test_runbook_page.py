"""docs/runbooks.md names only what docs/runbooks.py can run or check. tests/cluster/test_runbooks.py lets it do so."""

from __future__ import annotations

import pytest
from runbook_page import Code, Kind, code_of_the_page, is_defined, read

PAGE = """# Page

Look at `kedge
info`.

## First

```console
$ export A=1
printed
```

1. See `kedge_kv_pages` of `cache.size_mib`, or `size_mib: 3`.
"""


def test_all_code_of_the_page_is_known() -> None:
    page = code_of_the_page()
    assert len({code.text for code in page if code.kind is Kind.COMMAND}) > 20
    assert [code.text for code in page if code.kind is Kind.METRIC and not is_defined(code.text)] == []


def test_code_is_found_in_lines_of_console_blocks_and_in_backticks() -> None:
    assert list(read(PAGE, {"cache.size_mib"})) == [
        Code("", Kind.COMMAND, "kedge info"),
        Code("First", Kind.COMMAND, "export A=1"),
        Code("First", Kind.METRIC, "kedge_kv_pages"),
        Code("First", Kind.SETTING, "cache.size_mib"),
        Code("First", Kind.SETTING, "size_mib: 3"),
    ]


def test_a_new_command_is_named() -> None:
    with pytest.raises(SystemExit, match="has `htop -d 5`, which is no command"):
        list(read("Look at `htop -d 5`.", set()))
