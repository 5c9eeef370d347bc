"""Bytes in JSON: text stays readable, everything else is carried as base64.

File names, environment values, scripts and task output are bytes.  Those that are valid
UTF-8 travel as they are; others as ``"\\0" + base64``.  The mark is unambiguous as none of the
texts that users send may hold a NUL in first place (output may: then it is encoded).

Standard library only: the drop-in commands import this module.
"""

from __future__ import annotations

from binascii import a2b_base64, b2a_base64

_MARK = "\0"


def pack(data: bytes) -> str:
    """``data`` as a string for JSON; ``unpack`` gives back the same bytes."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return _MARK + b2a_base64(data, newline=False).decode("ascii")
    if text.startswith(_MARK):
        return _MARK + b2a_base64(data, newline=False).decode("ascii")
    return text


def unpack(text: str) -> bytes:
    """The bytes that ``pack`` was given.

    Raises ``ValueError`` when a marked text is not base64.
    """
    if text.startswith(_MARK):
        return a2b_base64(text[1:])
    return text.encode("utf-8")


def pack_os(name: str) -> str:
    """A name from the operating system (``surrogateescape``) as a string for JSON."""
    return pack(name.encode("utf-8", "surrogateescape"))


def show(text: str) -> str:
    """A packed text for people: undecodable bytes become U+FFFD."""
    return unpack(text).decode("utf-8", "replace") if text.startswith(_MARK) else text
