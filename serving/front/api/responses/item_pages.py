"""Lists of items, a page at a time, in the form of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import Query

from serving.front.api.errors import refusal
from serving.front.api.responses.items import MAX_ID_CHARS, Json

PageSize = Annotated[int, Query(ge=1, le=100)]
ItemOrder = Literal["asc", "desc"]
PreviousItem = Annotated[str | None, Query(max_length=MAX_ID_CHARS)]
Included = Annotated[list[str] | None, Query(alias="include", max_length=32)]
"""Extra fields that items should have. Here no item has any."""


def item_page(items: Sequence[Json], limit: int, order: ItemOrder, after: str | None) -> Json:
    """The items after the item `after`, at most `limit`. Raises ServiceError if there is no such item."""
    if order == "desc":
        items = items[::-1]
    if after is not None:
        # Inputs, and responses made at once, may repeat an id. A page begins behind its last item, so the pages end.
        behind = next((at for at in range(len(items), 0, -1) if items[at - 1]["id"] == after), None)
        if behind is None:
            raise refusal(f"after: no item {after[:120]!r}.", "after")
        items = items[behind:]
    page = list(items[:limit])
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > limit,
    }
