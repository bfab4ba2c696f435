-- The catalogue of a data directory, version 1. It alone decides which files belong to which replica; files that it
-- does not name are ignored. Times are milliseconds since 1970 UTC.

-- `id` names the directory. `newest` only grows: numbers of removed versions are not used again. `keyed`: it has a key
-- or had one, because revoking the last one must not open the replica. `changed_at`: when a client last announced changes.
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

-- The newest is a whole file; each older one a delta against the next, described by `delta_bytes` and `delta_sha256`.
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

-- Error reports of clients; the oldest are removed.
CREATE TABLE reports (
    number   INTEGER PRIMARY KEY AUTOINCREMENT,
    replica  TEXT NOT NULL REFERENCES replicas (id) ON DELETE CASCADE,
    at       INTEGER NOT NULL,
    client   TEXT NOT NULL,
    document TEXT NOT NULL
) STRICT;
CREATE INDEX reports_by_replica ON reports (replica, number);
