"""Parser of the textual form that `ladder.ir.printer` writes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from ladder.ir.extents import canonical
from ladder.ir.graph import LEVELS, Axis, Graph, Literal, Node
from tile_types.errors import LadderError, ParseError
from tile_types.library import get_type
from tile_types.tile import Extent, Tile

T = TypeVar("T")

_TOKEN = re.compile(
    r"(?P<space>\s+|//[^\n]*)"
    r"|(?P<value>%[A-Za-z_]\w*(?:\.\d+)?)"
    r'|(?P<string>"(?:[^"\\\n]|\\.)*")'
    r"|(?P<number>\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)"
    r"|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<mark>[-+*(){}\[\]=:,@])"
)
_WORDS: dict[str, Literal] = {"true": True, "false": False, "none": None, "inf": math.inf, "nan": math.nan}


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    start: int


def parse(text: str) -> Graph:
    """Read a graph; ``parse(print_graph(g)) == g``. Comments run from ``//`` to the line's end.

    Raises ParseError: Names line and column, shows the line, and marks the place with a caret.
    """
    reader = _Reader(text)
    graph = reader.graph()
    reader.expect("end")
    return graph


def parse_literal(text: str) -> Literal:
    """Read an attribute's value, as `ladder.ir.printer.print_literal` writes it; raises ParseError."""
    reader = _Reader(text)
    value = reader.literal()
    reader.expect("end")
    return value


class _Reader:
    """Recursive descent over the tokens."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = self._tokens()
        self.position = 0

    def _tokens(self) -> list[_Token]:
        tokens, start = [], 0
        while start < len(self.text):
            match = _TOKEN.match(self.text, start)
            if match is None:
                self.fail(f"unexpected character {self.text[start]!r}", start)
            assert match.lastgroup is not None  # every alternative is named
            if match.lastgroup != "space":
                tokens.append(_Token(match.lastgroup, match.group(), start))
            start = match.end()
        return [*tokens, _Token("end", "the end", len(self.text))]

    def fail(self, message: str, start: int | None = None) -> NoReturn:
        """Raise ParseError at a place in the text, by default at the current token."""
        offset = self.token.start if start is None else start
        line = self.text.count("\n", 0, offset) + 1
        begin = self.text.rfind("\n", 0, offset) + 1
        shown = self.text[begin:].partition("\n")[0]
        column = offset - begin + 1
        raise ParseError(f"line {line}, column {column}: {message}\n  {shown}\n  {' ' * (column - 1)}^")

    def located(self, start: int, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function; its errors become ParseErrors that point at ``start``."""
        try:
            return function(*arguments)
        except (LadderError, ValueError) as error:
            failure = error
        try:
            self.fail(str(failure), start)
        except ParseError as located:
            raise located from failure

    @property
    def token(self) -> _Token:
        return self.tokens[self.position]

    def advance(self) -> _Token:
        token = self.token
        self.position += token.kind != "end"
        return token

    def at(self, text: str) -> bool:
        return self.token.text == text and self.token.kind in ("mark", "name")

    def accept(self, text: str) -> bool:
        found = self.at(text)
        self.position += found
        return found

    def expect(self, wanted: str) -> _Token:
        """Consume a token of that kind or text."""
        if self.token.kind == wanted or self.at(wanted):
            return self.advance()
        self.fail(f"expected {wanted!r}, found {self.token.text!r}")

    def graph(self) -> Graph:
        level = self.expect("name").text
        if level not in LEVELS:
            self.fail(
                f"a graph begins with {', '.join(LEVELS)}, found {level!r}",
                self.tokens[self.position - 1].start,
            )
        name = self.expect("name").text
        grid, loops = self.axes("grid"), self.axes("loops")
        self.expect("{")
        nodes = []
        while self.token.kind == "value":
            nodes.append(self.node())
        self.expect("return")
        outputs = self.values()
        self.expect("}")
        return Graph(name, level, tuple(nodes), outputs, grid, loops)

    def axes(self, label: str) -> tuple[Axis, ...]:
        if not self.accept(label):
            return ()
        self.expect("(")
        return tuple(Axis(name, extent) for name, extent in self.named(self.extent))

    def values(self) -> tuple[str, ...]:
        values = []
        while self.token.kind == "value":
            values.append(self.advance().text[1:])
            if not self.accept(","):
                break
        return tuple(values)

    def node(self) -> Node:
        name = self.advance().text[1:]
        if "." in name:
            self.fail(f"a node's name has no '.', found %{name}", self.tokens[self.position - 1].start)
        self.expect("=")
        operator = self.expect("name").text
        self.expect("(")
        inputs = self.values()
        attributes = tuple(self.named(self.literal))
        self.expect(":")
        tiles = [self.tile()]
        while self.accept(","):
            tiles.append(self.tile())
        body = self.graph() if self.accept("=") else None
        return Node(name, operator, inputs, attributes, tuple(tiles), body)

    def named(self, read: Callable[[], T]) -> Iterator[tuple[str, T]]:
        """Yield what is written ``name=value``, up to the closing parenthesis."""
        while not self.accept(")"):
            name = self.expect("name").text
            self.expect("=")
            yield name, read()
            if not self.at(")"):
                self.expect(",")

    def tile(self) -> Tile:
        token = self.expect("name")
        ttype = self.located(token.start, get_type, token.text)
        shape = self.shape()
        level = self.expect("name").text if self.accept("@") else "dram"
        layout: Literal = None
        if self.accept("{"):
            layout = self.literal()
            self.expect("}")
        return self.located(token.start, Tile, ttype, shape, level, layout)

    def shape(self) -> tuple[Extent, ...]:
        self.expect("[")
        extents = []
        while not self.accept("]"):
            extents.append(self.extent())
            if not self.at("]"):
                self.expect(",")
        return tuple(extents)

    def extent(self) -> Extent:
        """Read up to a comma or the closing bracket at depth 0."""
        start, depth = self.token, 0
        while depth or not (self.at(",") or self.at("]") or self.at(")")):
            if self.token.kind == "end":
                self.fail("an extent does not end", start.start)
            depth += self.at("(") - self.at(")")
            self.advance()
        text = self.text[start.start : self.token.start].strip()
        return self.located(start.start, canonical, int(text) if text.isdecimal() else text)

    def literal(self) -> Literal:
        if self.accept("("):
            items = []
            while not self.accept(")"):
                items.append(self.literal())
                if not self.at(")"):
                    self.expect(",")
            return tuple(items)
        if self.token.kind == "string":
            token = self.advance()
            text: str = self.located(token.start, json.loads, token.text)
            return text
        sign = -1 if self.accept("-") else 1
        if self.token.kind == "number":
            number = self.advance().text
            return sign * (int(number) if number.isdecimal() else float(number))
        if self.token.text in _WORDS and self.token.kind == "name":
            word = _WORDS[self.advance().text]
            return -word if sign < 0 and isinstance(word, float) else word
        self.fail(f"expected a number, text, true, false, none or a tuple, found {self.token.text!r}")
