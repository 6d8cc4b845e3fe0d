"""Words of others, such as a model's, as they may be sent to a terminal."""

from __future__ import annotations

from types import MappingProxyType

REPLACED = "\N{REPLACEMENT CHARACTER}"
_CONTROLS = (*range(0x20), *range(0x7F, 0xA0))
_SURROGATES = range(0xD800, 0xE000)
_SHOWN = MappingProxyType(
    {**dict.fromkeys((*_CONTROLS, *_SURROGATES), REPLACED), ord("\n"): "\n", ord("\t"): "\t", ord("\r"): ""}
)


def printable(words: str) -> str:
    """Without what a terminal would obey: of control characters only line ends, as \\n alone, and tabs stay. Half a
    surrogate pair cannot be written at all."""
    return words.translate(_SHOWN)
