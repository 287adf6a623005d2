"""Who has a lab's name, and where its socket is found: a lock beside the socket says so, from before the network is built.

A lab outlives the session that has built it, and its files lie where others clear up: a runtime directory goes with its user's last
logout, and what is old in `/tmp` goes too. So the lock lies in both folders in which commands look, has the sticky bit, which says that it
is in use, and is made anew where it has gone all the same. A lab whose name another one has taken meanwhile ends.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import stat
from contextlib import suppress
from pathlib import Path

from gradwire.lab.errors import LabError

_BUILDER_SECONDS = 30.0  # to remove what it has built: some seconds at most
_LOCK_MODE = 0o600


def path_of(name: str) -> Path:
    """The socket of the lab of this name; where none is up or being built, that of one that would be built here.

    Who logs in has a runtime directory; what cron, `su` or a step of CI starts has none, and its labs are looked for all the same. A
    directory that somebody chose is the only one.

    Raises:
        LabError: somebody else has made the folder.
    """
    own = folder() / name
    usual = [other / name for other in _usual_folders(own.parent)]
    places = [own, *(other for other in usual if own in usual and other != own and _is_own(other.parent))]
    kept = [place for place in places if keeper_of(place) is not None]
    # Each has the lock of a lab, and one the socket.
    return next((place for place in kept if place.exists()), kept[0] if kept else own)


def new_path_of(name: str) -> Path:
    """The socket for a lab of this name that is to be built.

    Raises:
        LabError: there is one that was built with another runtime directory, or is being built; or somebody else has made the folder.
    """
    path = folder() / name
    if keeper_of(path_of(name)) is not None:
        raise _is_taken(name)
    return path


def folder() -> Path:
    """Where the sockets of labs are that this user builds; there as long as a lab is up.

    Raises:
        LabError: somebody else has made it.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    # `su` leaves that of another user.
    base = runtime if runtime and os.access(runtime, os.W_OK) else "/tmp"  # noqa: S108  (the folder below is the user's alone)
    path = Path(base, f"gradwire-lab-{os.getuid()}")
    with suppress(FileNotFoundError):
        _check_own(path)
    return path


def _usual_folders(own: Path) -> list[Path]:
    """With a runtime directory and without; of the user whose `folder` is given, whose number is another one within a sandbox."""
    user = own.name.rpartition("-")[2]
    return [Path(base, own.name) for base in (f"/run/user/{user}", "/tmp")]  # noqa: S108  as above


def _is_taken(name: str) -> LabError:
    text = f"the lab {name} is up already, or being built: gradwire lab --name {name} down, or another --name"
    return LabError(text)


def _is_own(path: Path) -> bool:
    """Whether it is there, and nobody else can have put something into it."""
    try:
        _check_own(path)
    except (LabError, OSError):
        return False
    return path.is_dir()


def _check_own(path: Path) -> None:
    status = path.stat(follow_symlinks=False)
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise LabError(f"{path} belongs to somebody else or is open to others: remove it")


def identity(pid: int) -> str:
    """Tells a process from every other one, also from a later one with its number; nothing, where there is none."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return f"{pid} {words[19]}"  # when it was started


def keeper_of(path: Path) -> int | None:
    """The process that keeps the lab of this socket, or is building it."""
    with suppress(OSError, ValueError):
        told = _lock_path(path).read_text()
        pid = int(told.split()[0]) if told else 0
        if told and told == identity(pid):
            return pid
    return None


def _lock_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def end_builder(path: Path) -> bool:
    """Ends a lab that answers nobody yet, as it is still being built, and waits until it has gone; False: there is none.

    Raises:
        LabError: it does not end.
    """
    pid = keeper_of(path)
    if pid is None:
        return False
    with suppress(ProcessLookupError), os.fdopen(os.pidfd_open(pid)) as keeper:
        if keeper_of(path) == pid:  # still the one that is meant
            signal.pidfd_send_signal(keeper.fileno(), signal.SIGTERM)
        if not select.select([keeper], [], [], _BUILDER_SECONDS)[0]:
            raise LabError(f"process {pid}, which builds the lab, does not end")
    return True


class Claim:
    """The right to be the lab of a name, held until it is given up or the process ends. A context manager.

    Attributes:
        path: of the lab's socket; `renew` may change it.
    """

    def __init__(self, path: Path, keeper: str) -> None:
        """Takes it, and makes the folder.

        Args:
            path: of the lab's socket.
            keeper: the `identity`, outside of the sandbox, of the process that SIGTERM is to reach.

        Raises:
            LabError: there is such a lab, or one is being built; or the folder is not the user's alone.
        """
        self.path = self._first = path
        self._keeper = keeper
        self._usual = [other / path.name for other in _usual_folders(path.parent)]
        self._locks: dict[Path, int] = {}
        try:
            for place in self._places():
                self._hold(place, is_needed=place == path)
        except BlockingIOError:
            self.give_up()
            raise _is_taken(path.name) from None
        except BaseException:
            self.give_up()
            raise

    def _places(self) -> list[Path]:
        """Where the name is locked, in the same order for all who want it: of the usual folders each, of one that somebody chose that."""
        return self._usual if self._first in self._usual else [self._first]

    def holds(self, place: Path) -> bool:
        """Whether nobody else can have the socket that is there."""
        lock = self._locks.get(place)
        with suppress(OSError):
            return lock is not None and os.path.samestat(os.fstat(lock), _lock_path(place).lstat())
        return False

    def renew(self) -> None:
        """Takes again what somebody has removed, the folder too; `path` is then where the lab was built, if that can be, or a usual folder.

        Raises:
            LabError: another lab has the name by now.
            OSError: there is no folder left for the socket; LabError, where it belongs to somebody else.
        """
        try:
            for place in dict.fromkeys((*self._places(), *self._locks)):
                if not self.holds(place):
                    self._drop(place)
                    self._hold(place, is_needed=False)
            if not self._locks:
                self._hold(self._usual[-1], is_needed=True)
        except BlockingIOError:
            name = self.path.name
            raise LabError(
                f"the files of the lab {name} were removed, and another lab has its name by now: this one has ended"
            ) from None
        self.path = next(place for place in (self._first, *self._usual) if place in self._locks)

    def _hold(self, place: Path, *, is_needed: bool) -> None:
        """Locks the name there, if that can be or is needed. Raises BlockingIOError where another lab has it."""
        try:
            lock = _lock(place)
        except BlockingIOError:
            raise
        except (OSError, LabError):
            if is_needed:
                raise
            return
        self._locks[place] = lock
        place.unlink(missing_ok=True)  # a socket of one that was killed
        os.ftruncate(lock, 0)
        os.write(lock, self._keeper.encode())
        with suppress(OSError):  # not every file system has it
            os.fchmod(lock, _LOCK_MODE | stat.S_ISVTX)

    def _drop(self, place: Path) -> None:
        lock = self._locks.pop(place, None)
        if lock is not None:
            os.close(lock)

    def give_up(self) -> None:
        """Lets others have the name. The second time nothing is left to do."""
        for place in tuple(self._locks):
            if self.holds(place):
                _lock_path(place).unlink(missing_ok=True)
            self._drop(place)
            _leave_folder(place)
        _leave_folder(self._first)

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_up()


def _leave_folder(place: Path) -> None:
    with suppress(OSError):  # another lab is there
        place.parent.rmdir()


def _lock(place: Path) -> int:
    """Makes the folder and locks the name there.

    Raises:
        BlockingIOError: another lab has it.
        OSError: there can be no folder.
        LabError: the folder is not the user's alone.
    """
    while True:  # the last one to have it may just have removed its file, or the folder
        place.parent.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):
            _check_own(place.parent)
            lock = os.open(_lock_path(place), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _LOCK_MODE)
            if _is_locked(lock, place):
                return lock
            os.close(lock)


def _is_locked(lock: int, place: Path) -> bool:
    """Locks it; False where it is not the file of that name any more. Closes it where it raises."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(lock)
        raise
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(lock), _lock_path(place).stat())
    return False
