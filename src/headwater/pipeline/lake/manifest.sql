-- The manifest of a lake, version 1. It alone says which files belong to which table: a file that it does not name is
-- not there. Times are milliseconds since 1970 UTC, paths are relative to the lake.

CREATE TABLE files (
    path     TEXT PRIMARY KEY,
    "table"  TEXT NOT NULL,
    day      TEXT,
    prefix   TEXT,
    seq_from INTEGER NOT NULL,
    seq_to   INTEGER NOT NULL,
    rows     INTEGER NOT NULL,
    bytes    INTEGER NOT NULL,
    sha256   TEXT NOT NULL,
    added_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX files_by_table ON files ("table", seq_to);

-- Files that were replaced. A query that began before may still read them, so they stay for a while.
CREATE TABLE dropped (
    path TEXT PRIMARY KEY,
    at   INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- How far a table has come: everything of the log at or below `seq` is in it.
CREATE TABLE marks (
    "table" TEXT PRIMARY KEY,
    seq     INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- One row for each stretch of the log that was taken into bronze.
CREATE TABLE batches (
    upto  INTEGER PRIMARY KEY,
    after INTEGER NOT NULL,
    rows  INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    files INTEGER NOT NULL,
    at    INTEGER NOT NULL
) STRICT;

-- By number, for a clock may go back.
CREATE TABLE audits (
    number   INTEGER PRIMARY KEY AUTOINCREMENT,
    at       INTEGER NOT NULL,
    document TEXT NOT NULL
) STRICT;

-- Facts about the lake itself: schema_version, created_at, which run may write; of the log it belongs to, where it lies, its salt and birth.
CREATE TABLE facts (
    name  TEXT PRIMARY KEY,
    value ANY NOT NULL
) STRICT, WITHOUT ROWID;
