"""Files that are written after minutes or hours of work: tried before it, whole or not there after it, and each though another fails."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Of a folder in which nothing may be made, and of a file that is a mount.
_NOT_REPLACED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.EXDEV)


def check(file: Path) -> None:
    """Tries whether `replace` can write this file.

    Raises:
        OSError: it cannot; the message names the file or its folder.
    """
    if file.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    if not _is_stream(file) and not (file.exists() and os.access(file, os.W_OK)):
        check_folder(file.resolve().parent)


def check_apart(**files: Path | None) -> None:
    """Files that are written one after the other must be several: the last one would be all that is left.

    Args:
        files: by the names of their options without the hyphens; None: not asked for.

    Raises:
        ValueError: two are one.
    """
    named: dict[Path, str] = {}
    for name, file in files.items():
        if file is None or _is_stream(file):
            continue
        other = named.setdefault(file.resolve(), name)
        if other != name:
            raise ValueError(f"--{other} and --{name} are one file, {file}: one would be written over the other")


def check_folder(folder: Path) -> None:
    """Tries whether files can be made in a folder, by one that is gone at once: permissions say nothing of a file system's own.

    Raises:
        OSError: none can be made there.
    """
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".gradwire-"):
            pass
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from error


def replace(file: Path, text: str) -> None:
    """Writes a file whole or not at all: one of an earlier run is lost only when the new one is there.

    In UTF-8 whatever the locale says; what a command line had that is none, as a byte of another encoding in a name, is written as an
    escape. One that may be written and not be replaced (mounted by itself, or in a folder of somebody else) is written where it is.

    Raises:
        OSError: it cannot be written; nothing of it stays.
    """
    if _is_stream(file):
        _write(file, "w", text)
        return
    file = file.resolve()
    # Not by the number of the process: in the sandbox's namespace those of two runs are the same. Made as any file is, for its mode.
    unfinished = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    try:
        _write(unfinished, "x", text)
        unfinished.replace(file)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        if error.errno not in _NOT_REPLACED or not file.exists():
            raise
        _write(file, "w", text)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _write(file: Path, mode: str, text: str) -> None:
    with file.open(mode, encoding="utf-8", errors="backslashreplace") as opened:
        opened.write(text)


def shown(file: Path) -> str:
    """Its name for people, which a terminal takes whatever bytes it is of."""
    return str(file).encode(errors="backslashreplace").decode()


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Within it, no other run can hold the folder: each would write over the logs and results of the other.

    Nothing is left in it. Where a file system has no such locks nobody is kept out.

    Raises:
        BlockingIOError: another run holds it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise BlockingIOError(error.errno, "another run writes into it, name another folder", str(folder)) from None
    except OSError:
        pass
    try:
        yield
    finally:
        os.close(descriptor)


class Attempts:
    """Writes of which each is made though another one fails; what failed is raised at the end."""

    def __init__(self) -> None:
        self._failed: list[str] = []

    @contextmanager
    def one(self) -> Iterator[None]:
        """Within it, a file is written: an OSError is kept."""
        try:
            yield
        except OSError as error:
            self._failed.append(str(error))

    def end(self) -> None:
        """Raises OSError, saying what all that failed said."""
        if self._failed:
            raise OSError("; ".join(self._failed))


def _is_stream(file: Path) -> bool:
    """Whether it is a pipe, a terminal: nothing that could be replaced."""
    return file.exists() and not file.is_file()
