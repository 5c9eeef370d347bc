"""NEFF container: the 1024-byte header and the tar behind it.

Header (little-endian, in order): u64 pkg_version, header_size, data_size, neff_version_major,
neff_version_minor; u8[128] build version; u32 num_tpb; u8[32] hash of the data (MD5 for package
version 1, SHA-256 for 2); u8[16] uuid; char[256] name; u32 requested_tpb_count; u8[64]
tpb_per_node; u64 feature_bits; u32 lnc_size; 468 bytes of padding.

Data: an uncompressed ustar archive of ``manifest.json``, ``program.json``, ``stablehlo.mlir``
and ``constants/<name>.bin`` (raw little-endian arrays). Nothing in it is executable, and every
size is checked against the size of the file before memory is taken for it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import struct
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from neuron_runtime.compiler.ir import (
    Array,
    Program,
    ProgramFormatError,
    numpy_dtype,
    program_from_json,
    program_to_json,
    type_from_json,
)
from neuron_runtime.compiler.verify import VerifyError, verify_against_manifest, verify_program
from neuron_runtime.errors import NRT_STATUS, NrtError
from neuron_runtime.manifest import (
    Manifest,
    ManifestFormatError,
    manifest_from_json,
    manifest_to_json,
)

HEADER = struct.Struct("<5Q128sI32s16s256sI64sQI468s")
HEADER_SIZE = HEADER.size
PKG_VERSION = 2
NEFF_VERSION = (1, 1)
_HASHES = {1: hashlib.md5, 2: hashlib.sha256}
_MAX_MEMBERS = 65_536

assert HEADER_SIZE == 1024


@dataclass(slots=True)
class Neff:
    """A loaded or freshly built executable. ``stablehlo``: source text, may be empty."""

    manifest: Manifest
    program: Program
    stablehlo: str = ""
    uuid: bytes = b""
    build_version: str = ""
    source: str = "<memory>"


class _Reader:
    """Raises NRT_INVALID with the file's name in front."""

    def __init__(self, source: str) -> None:
        self.source = source

    def need(self, condition: bool, message: str) -> None:
        if not condition:
            raise self.invalid(message)

    def invalid(self, message: str) -> NrtError:
        return NrtError(NRT_STATUS.NRT_INVALID, f"{self.source}: {message}")


@dataclass(frozen=True, slots=True)
class _Header:
    pkg_version: int
    data_size: int
    version: tuple[int, int]
    build_version: str
    digest: bytes
    uuid: bytes
    requested: int
    lnc_size: int


def read_neff(source: bytes | os.PathLike[str], *, validate_hash: bool | None = None) -> Neff:
    """Read and check a NEFF from a file or from bytes.

    ``validate_hash``: compare the header's hash with the data; None asks the environment variable
    NEURON_RT_VALIDATE_HASH. Raises NrtError: NRT_INVALID for anything that is not a whole, well
    formed file, NRT_UNSUPPORTED_NEFF_VERSION for another format version. A file that cannot be
    opened or read raises the OSError.
    """
    if isinstance(source, bytes | bytearray | memoryview):
        raw, reader = memoryview(source), _Reader("<memory>")
        header = _parse_header(bytes(raw[:HEADER_SIZE]), len(raw), reader)
        data = raw[HEADER_SIZE:]
    else:
        path = Path(source)
        reader = _Reader(str(path))
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = _parse_header(file.read(HEADER_SIZE), size, reader)
            data = memoryview(file.read(header.data_size))
        reader.need(len(data) == header.data_size, "truncated while it was read")
    if validate_hash is None:
        wanted = os.environ.get("NEURON_RT_VALIDATE_HASH", "").strip().lower()
        validate_hash = wanted in ("true", "1", "yes", "on")
    if validate_hash:
        digest = _HASHES[header.pkg_version](data).digest().ljust(32, b"\0")
        reader.need(digest == header.digest, "hash of the data does not match the header")
    return _parse_data(data, header, reader)


def _parse_header(raw: bytes, file_size: int, reader: _Reader) -> _Header:
    reader.need(
        len(raw) == HEADER_SIZE,
        f"truncated: {len(raw)} bytes, the header alone has {HEADER_SIZE}",
    )
    fields = HEADER.unpack(raw)
    pkg, header_size, data_size, major, minor = fields[:5]
    reader.need(
        pkg in _HASHES and header_size == HEADER_SIZE,
        f"not a NEFF (package version {pkg}, header size {header_size})",
    )
    if major != NEFF_VERSION[0] or minor > NEFF_VERSION[1]:
        supported = ".".join(map(str, NEFF_VERSION))
        raise NrtError(
            NRT_STATUS.NRT_UNSUPPORTED_NEFF_VERSION,
            f"{reader.source}: NEFF version mismatch supported: {supported} "
            f"received: {major}.{minor}",
        )
    have = file_size - HEADER_SIZE
    reader.need(
        data_size == have,
        f"{'truncated' if data_size > have else 'trailing bytes'}: "
        f"header says {data_size} bytes of data, the file has {have}",
    )
    lnc = fields[13]
    reader.need(lnc in (1, 2), f"logical NeuronCore size {lnc} is not 1 or 2")
    build = fields[5].split(b"\0")[0].decode("ascii", "replace")
    return _Header(pkg, data_size, (major, minor), build, fields[7], fields[8], fields[10], lnc)


def _parse_data(data: memoryview, header: _Header, reader: _Reader) -> Neff:
    members = _untar(data, reader)
    for name in ("manifest.json", "program.json"):
        reader.need(name in members, f"{name} is missing")
    extra = [m for m in members if m not in _FIXED and not m.startswith("constants/")]
    reader.need(not extra, f"unknown member {extra[0] if extra else ''!r:.80}")
    try:
        manifest = manifest_from_json(_json(members["manifest.json"], "manifest.json", reader))
    except ManifestFormatError as error:
        raise reader.invalid(f"manifest.json: {error}") from None
    reader.need(header.lnc_size == manifest.lnc_size, "header and manifest differ in lnc_size")
    reader.need(
        header.requested == manifest.requested_cores, "header and manifest differ in core count"
    )
    raw_program = _json(members["program.json"], "program.json", reader)
    try:
        program = program_from_json(raw_program, _constants(raw_program, members, reader))
        verify_program(program)
        verify_against_manifest(program, manifest)
    except ProgramFormatError as error:
        raise reader.invalid(f"program.json: {error}") from None
    except VerifyError as error:
        raise reader.invalid(f"program.json: {error}") from None
    try:
        text = bytes(members.get("stablehlo.mlir", b"")).decode()
    except UnicodeDecodeError:
        raise reader.invalid("stablehlo.mlir is not UTF-8") from None
    return Neff(manifest, program, text, header.uuid, header.build_version, reader.source)


_FIXED = ("manifest.json", "program.json", "stablehlo.mlir")


def _json(raw: memoryview, name: str, reader: _Reader) -> Any:
    try:
        return json.loads(bytes(raw))
    except (ValueError, RecursionError) as error:
        raise reader.invalid(f"{name} is not JSON: {error!s:.120}") from None


def _constants(program: Any, members: dict[str, memoryview], reader: _Reader) -> dict[str, Array]:
    table = program.get("constants") if isinstance(program, dict) else None
    reader.need(isinstance(table, dict), "program.json: constants is not an object")
    assert isinstance(table, dict)
    arrays: dict[str, Array] = {}
    for name, entry in table.items():
        type_ = type_from_json_or_invalid(entry, name, reader)
        member = members.get(f"constants/{name}.bin")
        if member is None:
            raise reader.invalid(f"constant {name!r:.60} is missing")
        reader.need(
            len(member) == type_.nbytes,
            f"constant {name!r:.60} has {len(member)} bytes, its type {type_} needs {type_.nbytes}",
        )
        # Not a view of the file's bytes: those start at any address, slow for wide loads.
        array = np.empty(type_.shape, numpy_dtype(type_.dtype))
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(member, np.uint8)
        array.setflags(write=False)
        arrays[name] = array
    files = {f"constants/{name}.bin" for name in arrays}
    unused = [m for m in members if m.startswith("constants/") and m not in files]
    reader.need(not unused, f"member {unused[0] if unused else ''!r:.80} is not a constant")
    return arrays


def type_from_json_or_invalid(entry: Any, name: str, reader: _Reader) -> Any:
    """A constant's type, or NRT_INVALID naming the constant."""
    try:
        return type_from_json(entry, f"constant {name!r:.60}")
    except ProgramFormatError as error:
        raise reader.invalid(f"program.json: {error}") from None


def _untar(data: memoryview, reader: _Reader) -> dict[str, memoryview]:
    """Members of a plain ustar archive; anything but regular files is refused."""
    members: dict[str, memoryview] = {}
    offset = 0
    while offset + 512 <= len(data):
        block = bytes(data[offset : offset + 512])
        if block == bytes(512):
            reader.need(not any(data[offset:]), "data behind the end of the archive")
            return members
        name, size = _tar_entry(block, offset, reader)
        start = offset + 512
        reader.need(size <= len(data) - start, f"member {name!r:.80} is truncated")
        reader.need(name not in members, f"member {name!r:.80} appears twice")
        reader.need(len(members) < _MAX_MEMBERS, "too many members")
        members[name] = data[start : start + size]
        offset = start + (size + 511) // 512 * 512
    raise reader.invalid("the archive has no end mark (truncated)")


def _tar_entry(block: bytes, offset: int, reader: _Reader) -> tuple[str, int]:
    where = f"archive entry at byte {offset}"
    checksum = sum(block) - sum(block[148:156]) + 8 * 0x20
    reader.need(block[257:263] == b"ustar\0", f"{where} is not ustar")
    reader.need(block[156:157] == b"0", f"{where} is not a regular file")
    digits = {124: block[124:136], 148: block[148:156]}
    numbers = []
    for raw in digits.values():
        text = raw.rstrip(b"\0 ")
        reader.need(text.isdigit() and not set(text) & set(b"89"), f"{where} has a bad number")
        numbers.append(int(text, 8))
    reader.need(numbers[1] == checksum, f"{where} has a wrong checksum")
    try:
        name = (block[:100].split(b"\0")[0]).decode("ascii")
    except UnicodeDecodeError:
        raise reader.invalid(f"{where} has a name that is not ASCII") from None
    reader.need(bool(name), f"{where} has no name")
    return name, numbers[0]


# -- writing -----------------------------------------------------------------------------------


def neff_bytes(neff: Neff) -> bytes:
    """The file's content. The same input gives the same bytes."""
    if sys.byteorder != "little":
        raise NrtError(NRT_STATUS.NRT_FAILURE, "NEFF files are little-endian; this host is not")
    members: list[tuple[str, bytes]] = [
        ("manifest.json", _dumps(manifest_to_json(neff.manifest), indent=1)),
        ("program.json", _dumps(program_to_json(neff.program), indent=None)),
        ("stablehlo.mlir", neff.stablehlo.encode()),
    ]
    for name, array in neff.program.constants.items():
        members.append((f"constants/{name}.bin", array.tobytes()))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            info.mode = 0o644
            tar.addfile(info, io.BytesIO(content))
    data = buffer.getvalue()
    manifest = neff.manifest
    digest = hashlib.sha256(data).digest()
    header = HEADER.pack(
        PKG_VERSION,
        HEADER_SIZE,
        len(data),
        *NEFF_VERSION,
        manifest.compiler_version.encode()[:127],
        manifest.requested_cores,
        digest,
        neff.uuid or digest[:16],
        manifest.name.encode()[:255],
        manifest.requested_cores,
        bytes([min(manifest.requested_cores, 255)]),
        0,
        manifest.lnc_size,
        b"",
    )
    return header + data


def _dumps(value: Any, indent: int | None) -> bytes:
    separators = (",", ":") if indent is None else None
    return json.dumps(value, indent=indent, separators=separators).encode()


def write_neff(path: str | os.PathLike[str], neff: Neff) -> None:
    """Write the file so that it is whole or absent: temporary file, fsync, rename, fsync."""
    write_atomic(Path(path), neff_bytes(neff))


def write_atomic(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content`` in one step; raises OSError and leaves nothing behind."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), 0o666 & ~_umask())
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _umask() -> int:
    """The process's umask, read without changing it (changing would race with threads)."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    except OSError:
        pass
    return 0o077
