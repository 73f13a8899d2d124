"""The end of a JSON object in text that comes in pieces, in one pass."""

from __future__ import annotations

import re

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')


class JsonText:
    """Collects one object or array. It is not checked: brackets are counted, outside of strings."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._depth = 0
        self._in_string = self._is_escaped = False

    @property
    def text(self) -> str:
        """All that was fed and is of it."""
        return "".join(self._parts)

    def feed(self, text: str) -> int | None:
        """Where in `text` it ends, behind its last bracket; None: it goes on."""
        end = self._end(text)
        self._parts.append(text if end is None else text[:end])
        return end

    def _end(self, text: str) -> int | None:
        place = 0
        if self._is_escaped and text:
            self._is_escaped, place = False, 1
        while True:
            found = (_IN_STRING if self._in_string else _OUTSIDE).search(text, place)
            if found is None:
                return None
            place, sign = found.end(), found.group()
            if sign == '"':
                self._in_string = not self._in_string
            elif sign == "\\":
                self._is_escaped = place == len(text)
                place += 1
            elif sign in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    return place
