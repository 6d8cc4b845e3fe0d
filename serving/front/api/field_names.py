"""What a protocol calls the fields that the cluster names in its errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from msgspec.structs import replace

from serving.wire.turns import ErrorInfo, ServiceError

_MESSAGE = re.compile(r"messages\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class FieldNames:
    """The protocol's names, `by_field`; other fields keep theirs. `of_message`: the same for a message of the prompt,
    by its index (None: `messages[index]`)."""

    by_field: Mapping[str, str] = field(default_factory=dict)
    of_message: Callable[[int], str] | None = None

    @contextmanager
    def in_errors(self) -> Iterator[None]:
        """ServiceErrors that are raised within name what the client knows."""
        try:
            yield
        except ServiceError as error:
            raise ServiceError(self._renamed(error.info)) from error

    def _renamed(self, error: ErrorInfo) -> ErrorInfo:
        if error.param is None:
            return error
        named = _MESSAGE.fullmatch(error.param)
        if named is not None and self.of_message is not None:
            name = self.of_message(int(named[1]))
            return replace(error, param=name, message=error.message.replace(named[0], name, 1))
        name = self.by_field.get(error.param, error.param)
        said = error.message.removeprefix(f"{error.param}: ")
        message = error.message if said == error.message else f"{name}: {said}"
        return replace(error, param=name, message=message)


OWN_NAMES = FieldNames()
