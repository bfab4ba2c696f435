-- The catalogue of a data directory, version 1. It alone says which files belong to which replica: a file that it does
-- not name is not there. Times are milliseconds since 1970 UTC.

-- `id` names the directory. `newest` only grows: a version's number never comes back, whatever was deleted. `keyed`: it
-- has a key or had one, for revoking the last must not let everybody in. `changed_at`: when a client last said that its
-- database has changed and will be pushed.
CREATE TABLE replicas (
    id         TEXT PRIMARY KEY,
    namespace  TEXT NOT NULL,
    name       TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    newest     INTEGER NOT NULL DEFAULT 0,
    keyed      INTEGER NOT NULL DEFAULT 0,
    changed_at INTEGER,
    UNIQUE (namespace, name)
) STRICT, WITHOUT ROWID;

-- The newest lies there whole; each older one as a delta against the next, which `delta_bytes` and `delta_sha256` describe.
CREATE TABLE versions (
    replica       TEXT NOT NULL REFERENCES replicas (id) ON DELETE CASCADE,
    number        INTEGER NOT NULL,
    base          INTEGER NOT NULL,
    push_id       TEXT NOT NULL,
    message       TEXT NOT NULL,
    client        TEXT NOT NULL,
    at            INTEGER NOT NULL,
    size          INTEGER NOT NULL,
    page_size     INTEGER NOT NULL,
    pages         INTEGER NOT NULL,
    changed_pages INTEGER NOT NULL,
    wire_bytes    INTEGER NOT NULL,
    dbhash        TEXT,
    sha256        TEXT NOT NULL,
    delta_bytes   INTEGER,
    delta_sha256  TEXT,
    announced     INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (replica, number)
) STRICT, WITHOUT ROWID;
CREATE INDEX versions_unannounced ON versions (replica, number) WHERE announced = 0;

-- Of a key only the hash of its secret is kept.
CREATE TABLE keys (
    replica    TEXT NOT NULL REFERENCES replicas (id) ON DELETE CASCADE,
    id         TEXT NOT NULL,
    kind       TEXT NOT NULL CHECK (kind IN ('push', 'pull')),
    sha256     TEXT NOT NULL,
    label      TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (replica, id)
) STRICT, WITHOUT ROWID;

-- What went wrong at clients, in their words; the oldest go.
CREATE TABLE reports (
    number   INTEGER PRIMARY KEY AUTOINCREMENT,
    replica  TEXT NOT NULL REFERENCES replicas (id) ON DELETE CASCADE,
    at       INTEGER NOT NULL,
    client   TEXT NOT NULL,
    document TEXT NOT NULL
) STRICT;
CREATE INDEX reports_by_replica ON reports (replica, number);
