"""Checks that what a key was made from still is what it was.

A fingerprint walks dictionaries, cells and attributes. Each read becomes one
identity check here, and all checks of a region become one generated function,
about 20 ns a check. A check that fails proves nothing by itself: the caller
then computes the key anew. A check that holds proves that no object on the way
was exchanged; values reached through them are immutable or checked as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol


class _Cell(Protocol):
    cell_contents: Any


_MISSING = object()


@dataclass(slots=True)
class Checks:
    """A list of identity checks under construction."""

    _lines: list[str] = field(default_factory=list)
    _values: dict[str, Any] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)
    _seen: set[tuple[str, int, str]] = field(default_factory=set)

    def _name(self, value: Any) -> str:
        name = self._names.get(id(value))
        if name is None:
            name = self._names[id(value)] = f"v{len(self._values)}"
            self._values[name] = value
        return name

    def _add(self, kind: str, holder: Any, what: str, line: Callable[[], str]) -> None:
        mark = (kind, id(holder), what)
        if mark not in self._seen:
            self._seen.add(mark)
            self._lines.append(line())

    def item(self, holder: Any, key: Any, value: Any) -> None:
        """`holder[key] is value`, for a mapping or a list."""
        literal = type(key) in (str, int)

        def line() -> str:
            text = repr(key) if literal else self._name(key)
            read = f".get({text})" if isinstance(holder, dict) else f"[{text}]"
            return f"{self._name(holder)}{read} is {self._literal(value)}"

        self._add("item", holder, repr(key) if literal else f"id {id(key)}", line)

    def equal(self, holder: Any, copy: Any) -> None:
        """`holder == copy`, for a collection of plain values that may be changed in place."""
        self._add("equal", holder, "", lambda: f"{self._name(holder)} == {self._name(copy)}")

    def text(self, holder: Any, text: str) -> None:
        """`repr(holder)` has not changed, for an object of which its text is all that counts."""
        self._add("text", holder, "", lambda: f"repr({self._name(holder)}) == {text!r}")

    def absent(self, holder: Any, key: str) -> None:
        """`key not in holder`."""
        self._add("absent", holder, key, lambda: f"{key!r} not in {self._name(holder)}")

    def length(self, holder: Any) -> None:
        """`len(holder)` has not changed."""
        size = len(holder)
        self._add(
            "len",
            holder,
            "",
            lambda: f"len({self._name(holder)}) == {size}" if size else f"not {self._name(holder)}",
        )

    def keys(self, holder: Any) -> None:
        """`holder` has the same keys, in the same order: code may go through them."""
        if len(holder) < 2:
            self.length(holder)
        else:
            keys = tuple(holder)
            self._add("keys", holder, "", lambda: f"tuple({self._name(holder)}) == {self._name(keys)}")

    def no_attribute(self, holder: Any, name: str) -> None:
        """`holder` still has no attribute `name`."""
        self._add("no attr", holder, name, lambda: f"not hasattr({self._name(holder)}, {name!r})")

    def cell(self, cell: _Cell, value: Any) -> None:
        """The closure cell still holds `value`."""
        self._add("cell", cell, "", lambda: f"{self._name(cell)}.cell_contents is {self._literal(value)}")

    def attribute(self, holder: Any, name: str, value: Any) -> None:
        """`holder.name is value`."""
        self._add("attr", holder, name, lambda: f"{self._name(holder)}.{name} is {self._literal(value)}")

    def _literal(self, value: Any) -> str:
        return repr(value) if value is None or value is True or value is False else self._name(value)

    def compile(self) -> Callable[[], bool]:
        """One function that says whether every check still holds. Never raises."""
        if not self._lines:
            return lambda: True
        names = list(self._values)
        body = "\n        and ".join(self._lines)
        source = (
            f"def make({', '.join(names)}):\n"
            "  def check():\n"
            "    try:\n"
            f"      return bool({body})\n"
            "    except (AttributeError, KeyError, IndexError, ValueError, TypeError):\n"
            "      return False\n"
            "  return check\n"
        )
        scope: dict[str, Any] = {}
        exec(source, scope)
        check: Callable[[], bool] = scope["make"](*self._values.values())
        return check

    def __len__(self) -> int:
        return len(self._lines)
