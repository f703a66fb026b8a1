"""Archives: an .npz, which is a zip of arrays."""

from __future__ import annotations

import struct
import zipfile
from typing import TYPE_CHECKING, Final, cast

from zcactor.loading.array import Array, claimed_nbytes, read_elements
from zcactor.loading.header import read_header
from zcactor.loading.progress import Progress, Shown
from zcactor.loading.source import ArraySource, parsing

if TYPE_CHECKING:
    import io
    from collections.abc import Callable

    from zcactor.loading.source import Readable
    from zcactor.objectstore.store import Store

__all__ = ["ZIP_MAGICS", "read_archive"]

ZIP_MAGICS: Final = (b"PK\x03\x04", b"PK\x05\x06")
"""The first bytes of an archive: of its first member or, in an empty archive, of the end of its directory."""
_ZIP_END: Final = struct.Struct("<4s6xH10x")
"""The end of an archive, before its comment: magic, and the number of members."""
_MANY_MEMBERS: Final = 0xFFFF
"""The number of members in the directory that means as many or more."""
_DEFLATE_RATIO: Final = 1032
"""Bytes that one deflated byte can stand for, at most: two bits give at most 258."""


def read_archive(store: Store, path: str, file: io.FileIO, nbytes: int, progress: Progress) -> dict[str, Array]:
    """Read the arrays of an .npz, by name. All members are checked before anything is allocated."""
    with parsing(f"{path} is no valid .npz"):
        archive = zipfile.ZipFile(file)
        _check_count(archive, file, nbytes)
    arrays: dict[str, Array] = {}
    with archive:
        members = _members(path, archive, file, nbytes)
        total = sum(info.file_size for info, _ in members.values())
        try:
            with Shown(path, total, progress) as shown:
                for name, (info, start) in members.items():
                    arrays[name] = _member(store, path, archive, file, info, start, shown.advance)
        except BaseException:
            arrays.clear()  # the traceback would keep them
            raise
    return arrays


def _check_count(archive: zipfile.ZipFile, file: io.FileIO, nbytes: int) -> None:
    """Check that all members were found. A damaged length in the directory hides the members behind it, and zipfile
    does not notice.

    Raises:
        ValueError: members are missing, or the archive does not end where its file does.
    """
    file.seek(max(0, nbytes - _ZIP_END.size - len(archive.comment)))
    magic, expected = _ZIP_END.unpack(file.read(_ZIP_END.size))
    if magic != ZIP_MAGICS[1]:
        raise ValueError("its directory does not end where the file does")
    found = len(archive.infolist())
    if expected != min(found, _MANY_MEMBERS):
        raise ValueError(f"its directory has {expected:,} members, {found:,} were found")


def _members(
    path: str, archive: zipfile.ZipFile, file: io.FileIO, nbytes: int
) -> dict[str, tuple[zipfile.ZipInfo, int]]:
    """The members with the beginning of their bytes, by the names of the arrays. Each claims a size that `nbytes` can
    hold."""
    members: dict[str, tuple[zipfile.ZipInfo, int]] = {}
    for info in archive.infolist():
        what = f"{path}, member {info.filename!r}"
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(
                f"{what} is compressed by method {info.compress_type}; expected is 0, stored, or 8, deflated"
            )
        with parsing(f"{what} cannot be read"):
            archive.open(info).close()  # compares the directory with the member's own header
            file.seek(info.header_offset + 26)
            name_length, extra_length = struct.unpack("<HH", file.read(4))
        start = info.header_offset + 30 + name_length + extra_length
        if start + info.compress_size > nbytes:
            raise ValueError(f"{what} would end at byte {start + info.compress_size:,}, {nbytes:,} bytes were found")
        stored = info.compress_type == zipfile.ZIP_STORED
        most = info.compress_size if stored else info.compress_size * _DEFLATE_RATIO
        if info.file_size > most or (stored and info.file_size != most):
            raise ValueError(
                f"{what} claims {info.file_size:,} bytes, and {info.compress_size:,} were found, which cannot hold them"
            )
        name = info.filename.removesuffix(".npy")
        if name in members:
            raise ValueError(f"{what}: another member gives an array of that name, too")
        members[name] = info, start
    return members


def _member(
    store: Store,
    path: str,
    archive: zipfile.ZipFile,
    file: io.FileIO,
    info: zipfile.ZipInfo,
    start: int,
    advance: Callable[[int], None],
) -> Array:
    """Read one array of an archive."""
    what = f"{path}, member {info.filename!r}"
    if info.compress_type != zipfile.ZIP_STORED:
        with archive.open(info) as member:  # zipfile compares the checksum
            return _member_array(store, ArraySource(what, cast("Readable", member), info.file_size), advance)
    file.seek(start)  # past zipfile, which would read into bytes objects of its own
    return _member_array(store, ArraySource(what, file, info.file_size, crc=info.CRC), advance)


def _member_array(store: Store, source: ArraySource, advance: Callable[[int], None]) -> Array:
    """Read the array of a member. The member must hold one .npy and nothing else: otherwise its checksum, which covers
    the whole member, could not be compared."""
    claimed = source.left or 0
    form = read_header(source)
    nbytes = claimed_nbytes(source, form)
    if nbytes != source.left:
        raise ValueError(
            f"{source.what}: shape {form.shape} of dtype {form.dtype} takes {nbytes:,} bytes, "
            f"{source.left or 0:,} were found"
        )
    advance(claimed - nbytes)
    return read_elements(store, source, form, advance)
