"""Counts on disk: a journal of minutes and a checkpoint every few minutes, in one SQLite file.

Belongs here: the file's schema, how arrays become small blobs, and setting aside a file that cannot be used. All
functions block: call them in a thread, with a `Snapshot`. Never: pickles, or a failure that stops serving.
"""

from __future__ import annotations

import sqlite3
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, Self

from forecasting.blobs import Damaged, minute_blob
from forecasting.checkpoint import Saved, blob_bytes, load, write_rows, write_slots, write_state
from forecasting.snapshot import Fact, Snapshot, StoreSetAside

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable
    from pathlib import Path
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray

    from forecasting.tiers import Minute

__all__ = ["STORE", "Saved", "Store", "StoreFailed"]

STORE: Final = "forecast.sqlite"
"""The file's name, in the folder of the disk tier."""
SCHEMA: Final = 1
_APPLICATION: Final = 0x464F5245  # "FORE", so that another program's database is never taken for ours
_TABLES: Final = """
CREATE TABLE IF NOT EXISTS models(place INTEGER PRIMARY KEY, key TEXT NOT NULL, born INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS minutes(minute INTEGER PRIMARY KEY, known INTEGER NOT NULL, counts BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS fives(number INTEGER PRIMARY KEY, known INTEGER NOT NULL, codes BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS quarters(number INTEGER PRIMARY KEY, known INTEGER NOT NULL, codes BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS slots(slot INTEGER PRIMARY KEY, at INTEGER NOT NULL, sums BLOB NOT NULL,
                                 exposure BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS days(day TEXT PRIMARY KEY, actual BLOB NOT NULL, expected BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS arrays(name TEXT PRIMARY KEY, content BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS state(name TEXT PRIMARY KEY, content TEXT NOT NULL);
"""


class StoreFailed(OSError):
    """The file could not be read or written now: disk full, permissions, another process. Serving goes on."""


class Store:
    """The file of one server. Another process that opens it gets StoreFailed."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._path = path
        self._lock = threading.Lock()
        self._last: Snapshot | None = None
        self._models: tuple[tuple[str | None, ...], NDArray[np.int64]] | None = None

    @classmethod
    def open(cls, path: Path) -> tuple[Self, tuple[Fact, ...]]:
        """Open or create it. A damaged or newer file is renamed, with a fact. Raises StoreFailed."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return cls(_connected(path), path), ()
        except (Damaged, sqlite3.DatabaseError, UnicodeDecodeError) as error:  # a check may quote what is damaged
            _refuse_lock(error)
            aside = _set_aside(path)
            return cls(_connected(path), path), (StoreSetAside(str(aside), str(error)),)
        except OSError as error:
            raise StoreFailed(f"cannot use the file of counts: {error.strerror or error}") from error

    # -- writing -------------------------------------------------------------------------------------

    def append(
        self, table: tuple[str | None, ...], born: NDArray[np.int64], minutes: Iterable[tuple[int, Minute]]
    ) -> None:
        """Journal closed minutes (`Counts.closed`) and models that are new since the last call. Raises StoreFailed."""
        with self._writing() as connection:
            self._write_models(connection, table, born)
            connection.executemany(
                "INSERT OR REPLACE INTO minutes VALUES(?, ?, ?)",
                [(minute, row.known, minute_blob(row)) for minute, row in minutes],
            )

    def checkpoint(self, snapshot: Snapshot) -> None:
        """Write what has changed since the last checkpoint of this process. Raises StoreFailed."""
        last = self._last
        with self._writing() as connection:
            self._write_models(connection, snapshot.table, snapshot.born)
            write_slots(connection, snapshot, last)
            write_rows(connection, snapshot.tiers, None if last is None else last.tiers)
            write_state(connection, snapshot)
        self._last = snapshot

    def _write_models(
        self, connection: sqlite3.Connection, table: tuple[str | None, ...], born: NDArray[np.int64]
    ) -> None:
        if self._models is not None and self._models[0] is table:
            return
        connection.execute("DELETE FROM models")
        connection.executemany(
            "INSERT INTO models VALUES(?, ?, ?)",
            [(place, key, int(born[place])) for place, key in enumerate(table) if key is not None],
        )
        self._models = table, born

    @contextmanager
    def _writing(self) -> Generator[sqlite3.Connection]:
        """One transaction; all of it or nothing."""
        try:
            with self._lock, self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
        except sqlite3.Error as error:
            self._models = None
            raise StoreFailed(f"cannot write the file of counts: {error}") from error

    # -- reading -------------------------------------------------------------------------------------

    def load(self) -> tuple[Saved | None, tuple[Fact, ...]]:
        """What the file holds, None for a new one. A damaged one is set aside, with a fact. Raises StoreFailed."""
        try:
            with self._lock:
                saved = load(self._connection)
        except (Damaged, sqlite3.DatabaseError, UnicodeDecodeError) as error:  # a check may quote what is damaged
            _refuse_lock(error)
            with self._lock:
                self._connection.close()
                aside = _set_aside(self._path)
                self._connection = _connected(self._path)
            return None, (StoreSetAside(str(aside), str(error)),)
        if saved is not None:
            self._last = saved.snapshot
        return saved, ()

    def stored_bytes(self) -> dict[str, int]:
        """Bytes of blobs by table, to be shown. Raises StoreFailed."""
        try:
            with self._lock:
                return blob_bytes(self._connection)
        except sqlite3.Error as error:
            raise StoreFailed(f"cannot read the file of counts: {error}") from error

    def close(self) -> None:
        """Fold the journal of SQLite into the file and let it go."""
        with self._lock, suppress(sqlite3.Error):
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Store {self._path.name}>"


# -- the file ----------------------------------------------------------------------------------------


def _connected(path: Path) -> sqlite3.Connection:
    """An exclusive connection with our schema. Raises Damaged for a file that is not ours to use."""
    new = not path.exists() or path.stat().st_size == 0
    connection = sqlite3.connect(path, timeout=0.5, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        connection.execute("PRAGMA journal_mode=WAL")
        # A killed process loses nothing that was committed; a power cut loses the last minutes, never the file.
        connection.execute("PRAGMA synchronous=NORMAL")
        if new:
            connection.execute(f"PRAGMA application_id={_APPLICATION}")
            connection.execute(f"PRAGMA user_version={SCHEMA}")
        else:
            _check(connection)
        connection.executescript(_TABLES)
    except BaseException:
        connection.close()
        raise
    return connection


def _check(connection: sqlite3.Connection) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application == 0 and version == 0 and not connection.execute("SELECT 1 FROM sqlite_master").fetchone():
        connection.execute(f"PRAGMA application_id={_APPLICATION}")
        connection.execute(f"PRAGMA user_version={SCHEMA}")
        return  # killed while it was being created
    if application != _APPLICATION:
        raise Damaged("the file is another program's database")
    if version > SCHEMA:
        raise Damaged(f"the file has schema {version}, this release knows {SCHEMA}")
    (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise Damaged(f"the file is damaged: {found}")


def _refuse_lock(error: Exception) -> None:
    """A file in use, on a full disk or without permission is not damaged: it must stay where it is."""
    if isinstance(error, sqlite3.OperationalError):
        raise StoreFailed(f"cannot use the file of counts: {error}") from error


def _set_aside(path: Path) -> Path:
    """Rename the file, and what SQLite keeps beside it, to the first free name."""
    number = 1
    while (aside := path.with_name(f"{path.name}.aside-{number}")).exists():
        number += 1
    try:
        path.rename(aside)
        for suffix in ("-wal", "-shm", "-journal"):
            beside = path.with_name(path.name + suffix)
            if beside.exists():
                beside.rename(aside.with_name(aside.name + suffix))
    except OSError as error:
        raise StoreFailed(f"cannot set the file of counts aside: {error.strerror or error}") from error
    return aside
