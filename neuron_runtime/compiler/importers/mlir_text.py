"""Parser of MLIR text as JAX prints it for StableHLO modules: text to a tree of raw operations.

Grammar: https://mlir.llvm.org/docs/LangRef (operations, attributes), the StableHLO specification
for the pretty forms. Only the shape of the text is understood here; what an operation means is
the business of ``stablehlo.py``. Locations (``loc(...)``) are skipped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NoReturn

from neuron_runtime.compiler.ir import MLIR_DTYPES, TensorType
from neuron_runtime.errors import CompileError

_TOKEN = re.compile(
    r"""
    (?P<space>[ \t\r]+|//[^\n]*)
  | (?P<newline>\n)
  | (?P<string>"(?:[^"\\]|\\.)*")
  | (?P<value>%[\w$.\-]+(?:\#\d+)?)
  | (?P<symbol>@(?:[\w$.\-]+|"[^"]*"))
  | (?P<tensor>tensor<[^<>]*(?:<[^<>]*>[^<>]*)*>)
  | (?P<dense>dense<[^>]*>|dense_resource<[^>]*>)
  | (?P<array>array<[^>]*>)
  | (?P<hash>\#[\w$.\-]+)
  | (?P<bang>![\w$.]+)
  | (?P<block>\^[\w$.\-]+)
  | (?P<number>-?0x[0-9a-fA-F]+|-?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)
  | (?P<ident>[A-Za-z_][\w$.]*)
  | (?P<punct>->|<\{|\}>|[()\[\]{}<>,:=?*+\-|/])
    """,
    re.VERBOSE,
)
_SCALAR_TYPE = re.compile(r"[su]?i\d+|b?f\d+|index")


@dataclass(slots=True)
class Token:
    """A piece of text, its kind (group name of the pattern) and its line."""

    kind: str
    text: str
    line: int


@dataclass(slots=True)
class RawRegion:
    """Block arguments with types, and operations."""

    args: list[tuple[str, TensorType]]
    ops: list[RawOp]


@dataclass(slots=True)
class RawOp:
    """An operation as written. ``words``: loose identifiers such as ``LT`` in their order."""

    name: str
    line: int
    results: list[tuple[str, int]] = field(default_factory=list)
    operands: list[str] = field(default_factory=list)
    attrs: dict[str, Any] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    symbol: str = ""
    in_types: list[TensorType] = field(default_factory=list)
    out_types: list[TensorType] = field(default_factory=list)
    regions: list[RawRegion] = field(default_factory=list)


@dataclass(slots=True)
class RawFunc:
    """A function. The attribute dictionaries belong to its arguments and results."""

    name: str
    line: int
    region: RawRegion
    arg_attrs: list[dict[str, Any]]
    result_types: list[TensorType]
    result_attrs: list[dict[str, Any]]


@dataclass(slots=True)
class RawModule:
    """A module: name, attributes, functions, device meshes (axis name, size)."""

    name: str = "module"
    attrs: dict[str, Any] = field(default_factory=dict)
    funcs: dict[str, RawFunc] = field(default_factory=dict)
    meshes: dict[str, list[tuple[str, int]]] = field(default_factory=dict)


@dataclass(slots=True)
class Dense:
    """Text between the brackets of ``dense<...>`` and the type behind it."""

    text: str
    type: TensorType | None


def tokenize(text: str) -> list[Token]:
    """Split; raises CompileError EIMP002 at the first character that fits nothing."""
    tokens: list[Token] = []
    line, position = 1, 0
    for match in _TOKEN.finditer(text):
        if match.start() != position:
            break
        position = match.end()
        kind = match.lastgroup or ""
        if kind == "newline":
            line += 1
        elif kind != "space":
            tokens.append(Token(kind, match.group(), line))
            line += match.group().count("\n")
    if position != len(text):
        snippet = text[position : position + 20].split("\n")[0]
        raise CompileError("EIMP002", f"line {line}: this is not MLIR text: {snippet!r}")
    tokens.append(Token("end", "end of file", line))
    return tokens


def parse_tensor_type(text: str, line: int) -> TensorType:
    """``tensor<8x128xf32>``; raises CompileError for dynamic shapes and unknown elements."""
    inner = text[len("tensor<") : -1].split(",")[0].strip()
    parts = inner.split("x")
    if "?" in inner:
        raise CompileError(
            "EIMP003",
            f"line {line}: {text} has a dynamic dimension; compile once for each fixed shape",
        )
    dims = []
    while parts and parts[0].isdigit():
        dims.append(int(parts.pop(0)))
    dtype = MLIR_DTYPES.get("x".join(parts))
    if dtype is None:
        known = ", ".join(sorted(MLIR_DTYPES))
        raise CompileError("EIMP003", f"line {line}: element type of {text} is not one of {known}")
    return TensorType(dtype, tuple(dims))


class Cursor:
    """Reads tokens one after the other; parses attributes and types."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.at = 0
        self.depth = 0

    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    def fail(self, wanted: str) -> NoReturn:
        token = self.token
        raise CompileError(
            "EIMP002", f"line {token.line}: expected {wanted}, found {token.text[:40]!r}"
        )

    def peek(self, text: str) -> bool:
        return self.token.text == text and self.token.kind != "string"

    def next(self) -> Token:
        token = self.token
        if token.kind == "end":
            self.fail("more text (the input is truncated)")
        self.at += 1
        return token

    def accept(self, text: str) -> bool:
        if self.peek(text):
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.accept(text):
            self.fail(repr(text))

    def expect_kind(self, kind: str) -> Token:
        if self.token.kind != kind:
            self.fail(kind)
        return self.next()

    def skip_balanced(self) -> None:
        """Skip one bracketed group, the cursor being at its opening bracket."""
        pairs = {"(": ")", "[": "]", "{": "}", "<": ">", "<{": "}>"}
        stack = [pairs[self.next().text]]
        while stack:
            token = self.next()
            if token.kind == "punct" and token.text in pairs:
                stack.append(pairs[token.text])
            elif token.kind == "punct" and token.text == stack[-1]:
                stack.pop()

    def skip_location(self) -> None:
        while self.peek("loc"):
            self.next()
            self.skip_balanced()

    # -- types -------------------------------------------------------------------------------

    def type(self) -> TensorType:
        token = self.token
        if token.kind != "tensor":
            self.fail("a tensor type (tokens, tuples and quantised types are not supported)")
        self.next()
        return parse_tensor_type(token.text, token.line)

    def type_list(self) -> list[TensorType]:
        """``(t, t)`` or ``t``."""
        if not self.accept("("):
            return [self.type()]
        types: list[TensorType] = []
        while not self.accept(")"):
            types.append(self.type())
            self.accept(",")
        return types

    def signature(self, op: RawOp) -> None:
        """``: t``, ``: t, t``, ``: (t, t) -> t`` or ``: t, t -> (t, t)``; absent for no values."""
        if not self.accept(":"):
            return
        first = self.type_list()
        while self.accept(","):
            first.append(self.type())
        op.in_types = first
        op.out_types = self.type_list() if self.accept("->") else first

    # -- attributes ----------------------------------------------------------------------------

    def attr_dict(self, close: str) -> dict[str, Any]:
        """Entries up to ``close``; an entry without a value is True."""
        attrs: dict[str, Any] = {}
        while not self.accept(close):
            token = self.next()
            if token.kind not in ("ident", "string"):
                self.at -= 1
                self.fail("an attribute name")
            key = token.text.strip('"')
            attrs[key] = self.attr_value() if self.accept("=") else True
            self.accept(",")
        return attrs

    def attr_value(self) -> Any:
        self.depth += 1
        if self.depth > 64:
            self.fail("an attribute nested less than 64 deep")
        try:
            return self._attr_value()
        finally:
            self.depth -= 1

    def _attr_value(self) -> Any:
        token = self.next()
        if token.kind == "number":
            if self.peek(":") and _SCALAR_TYPE.fullmatch(self.tokens[self.at + 1].text):
                self.at += 2
            return _number(token)
        if token.kind == "string":
            return token.text[1:-1]
        if token.kind == "dense":
            type_ = self.type() if self.accept(":") else None
            return Dense(token.text, type_)
        if token.kind == "array":
            return _array(token)
        if token.kind == "hash":
            return self._dialect_attr(token)
        if token.kind == "ident" and token.text in ("true", "false"):
            return token.text == "true"
        if token.text == "[":
            return self._list("]")
        if token.text == "{":
            return self.attr_dict("}")
        if token.text == "<":
            return self._list(">")
        if token.kind in ("ident", "symbol", "tensor", "bang", "value"):
            if self.peek("<"):
                self.skip_balanced()
            return token.text
        self.at -= 1
        return self.fail("an attribute value")

    def _list(self, close: str) -> list[Any]:
        values: list[Any] = []
        while not self.accept(close):
            values.append(self.attr_value())
            self.accept(",")
        return values

    def _dialect_attr(self, token: Token) -> Any:
        """``#stablehlo.gather<key = value, ...>`` as a dictionary, else the text."""
        if self.peek("<{"):
            self.skip_balanced()
            return token.text
        if not self.accept("<"):
            return token.text
        if self.tokens[self.at].kind == "ident" and self.tokens[self.at + 1].text == "=":
            return self.attr_dict(">")
        start = self.at
        depth = 1
        while depth:
            text = self.next().text
            depth += {"<": 1, ">": -1, "<{": 1, "}>": -1}.get(text, 0)
        return " ".join(t.text for t in self.tokens[start : self.at - 1])


def _number(token: Token) -> int | float:
    text = token.text
    if "0x" in text:
        return int(text, 16)
    if any(c in text for c in ".eE"):
        return float(text)
    return int(text)


def _array(token: Token) -> list[Any]:
    inner = token.text[len("array<") : -1]
    _, _, items = inner.partition(":")
    words = [w.strip() for w in items.split(",") if w.strip()]
    try:
        return [w == "true" if w in ("true", "false") else int(w) for w in words]
    except ValueError:
        raise CompileError("EIMP002", f"line {token.line}: not integers: {token.text}") from None
