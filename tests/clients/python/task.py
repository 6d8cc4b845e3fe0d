"""The task of every program here: find a ship with a tool, say where it is, and answer a second question."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field

MODEL = "kedge"
MAX_TOKENS = 200
RULES = 100
INSTRUCTIONS = "You answer for the harbour office.\n" + "\n".join(
    f"Rule {number}: a ship of the line {number} is told its berth before noon, and no other."
    for number in range(RULES)
)
"""Long, because agents' instructions are long."""
QUESTIONS = ("Where is the Anna?", "Which ship was it?")
BERTH = "Berth 7."
TOOL = "find_berth"
DESCRIPTION = "Tells which berth a ship is at."
PARAMETERS = {
    "type": "object",
    "properties": {"ship": {"type": "string"}},
    "required": ["ship"],
    "additionalProperties": False,
}


@dataclass
class Seen:
    """What a program saw while it did its task."""

    answers: list[str] = field(default_factory=list)
    asked_for: list[str] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)
    """The cached tokens of each request, as the client's own objects report them."""

    def find_berth(self, ship: str) -> str:
        """The tool itself."""
        self.asked_for.append(ship)
        return BERTH

    def tell(self) -> None:
        json.dump(vars(self), sys.stdout)
