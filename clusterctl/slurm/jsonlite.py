"""JSON by the C parts of the json package alone.

``import json`` loads ``re`` and with it half as much again as a bare interpreter does.  Decoding
uses the C scanner directly where CPython offers it, and json itself elsewhere.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

try:
    import _json

    _make_scanner: Any = _json.make_scanner
    _quote: Callable[[str], str] = _json.encode_basestring_ascii
except (ImportError, AttributeError):  # another Python implementation
    _make_scanner = None


class _Context:
    """What the C scanner asks of a decoder."""

    strict = False
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float
    memo: dict[str, str] = {}  # noqa: RUF012 - part of the scanner's interface


_scan: Callable[[str, int], tuple[Any, int]] | None = (
    _make_scanner(_Context()) if _make_scanner is not None else None
)


def loads(body: bytes) -> Any:
    """The value of one JSON text.  Raises ``ValueError``."""
    if _scan is None:
        import json

        return json.loads(body)
    text = body.decode("utf-8").strip(" \t\r\n")
    try:
        value, end = _scan(text, 0)
    except StopIteration:
        raise ValueError("not a JSON text") from None
    if end != len(text):
        raise ValueError("more than one JSON text")
    return value


def _encode(value: Any, parts: list[str]) -> None:
    if isinstance(value, str):
        parts.append(_quote(value))
    elif value is None:
        parts.append("null")
    elif isinstance(value, bool):
        parts.append("true" if value else "false")
    elif isinstance(value, int | float):
        parts.append(repr(value))
    elif isinstance(value, dict):
        mark = "{"
        for key, item in value.items():
            parts.append(f"{mark}{_quote(key)}:")
            _encode(item, parts)
            mark = ","
        parts.append("}" if mark == "," else "{}")
    elif isinstance(value, list | tuple):
        mark = "["
        for item in value:
            parts.append(mark)
            _encode(item, parts)
            mark = ","
        parts.append("]" if mark == "," else "[]")
    else:
        raise TypeError(f"{type(value).__name__} has no JSON form")


def dumps(value: Any) -> bytes:
    """``value`` (dicts, lists, strings, numbers, bools, None) as one JSON text."""
    if _make_scanner is None:
        import json

        return json.dumps(value).encode()
    parts: list[str] = []
    _encode(value, parts)
    return "".join(parts).encode("ascii")
