"""Makes text from others, such as a model, safe to send to a terminal."""

from __future__ import annotations

from types import MappingProxyType

REPLACED = "\N{REPLACEMENT CHARACTER}"
_CONTROLS = (*range(0x20), *range(0x7F, 0xA0))
_SURROGATES = range(0xD800, 0xE000)
_SHOWN = MappingProxyType(
    {**dict.fromkeys((*_CONTROLS, *_SURROGATES), REPLACED), ord("\n"): "\n", ord("\t"): "\t", ord("\r"): ""}
)


def printable(words: str) -> str:
    """Replaces control characters, which a terminal would obey. Only tabs and line ends, as \\n alone, stay. Half of a
    surrogate pair is replaced too, since it cannot be written."""
    return words.translate(_SHOWN)
