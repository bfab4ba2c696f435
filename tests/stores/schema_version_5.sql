-- The log's tables, version 5. Times are milliseconds since 1970 UTC.

-- One row, one message. `topic` and `data` are all an INSERT by hand needs; such a row is checked here. Headwater's own
-- rows were checked before and say so in `checked`: 1 if they have nothing but topic, data and time, else 2. A NULL `id`
-- follows from the row: see the view.
CREATE TABLE messages (
    seq            INTEGER PRIMARY KEY AUTOINCREMENT,
    topic          TEXT NOT NULL,
    data           TEXT NOT NULL,
    published_at   INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)),
    checked        INTEGER,
    id             TEXT,
    priority       INTEGER NOT NULL DEFAULT 0,
    deliver_at     INTEGER,
    expires_at     INTEGER,
    "from"         TEXT,
    "to"           TEXT,
    reply_to       TEXT,
    correlation_id TEXT,
    type           TEXT,
    version        INTEGER,
    content_type   TEXT,
    traceparent    TEXT,
    headers        TEXT,
    size           INTEGER GENERATED ALWAYS AS (length(CAST(data AS BLOB))) VIRTUAL,
    CONSTRAINT "topic must be tokens joined by dots, without wildcards or blanks" CHECK (
        checked IS NOT NULL OR (
            topic <> '' AND '.' || topic || '.' NOT GLOB '*..*' AND topic NOT GLOB '*[*>#' || char(1) || '- ]*'
        )
    ),
    CONSTRAINT "times are milliseconds since 1970" CHECK (
        checked IS NOT NULL OR (
            published_at BETWEEN 0 AND 253402300799999
            AND (deliver_at IS NULL OR deliver_at BETWEEN 0 AND 253402300799999)
            AND (expires_at IS NULL OR expires_at BETWEEN 0 AND 253402300799999)
        )
    ),
    CONSTRAINT "data must be JSON" CHECK (checked IS NOT NULL OR json_valid(data)),
    CONSTRAINT "headers must be a JSON object" CHECK (
        headers IS NULL OR checked IS NOT NULL OR (json_valid(headers) AND json_type(headers) = 'object')
    )
) STRICT;

-- Ids that publishers gave, for as long as the dedupe window remembers them. Outlives the message. `scoped_id` is the
-- topic and the id with a # between, which no topic holds: an id is known on its own topic alone.
CREATE TABLE remembered_ids (
    seq          INTEGER PRIMARY KEY,
    scoped_id    TEXT NOT NULL,
    published_at INTEGER NOT NULL
) STRICT;
CREATE UNIQUE INDEX remembered_ids_by_scoped_id ON remembered_ids (scoped_id);

-- What numbered publishers have stored: messages `number` and the `length` - 1 after it became `seq` and those after it.
CREATE TABLE receipts (
    publisher TEXT NOT NULL,
    number    INTEGER NOT NULL,
    length    INTEGER NOT NULL,
    seq       INTEGER NOT NULL,
    at        INTEGER NOT NULL,
    PRIMARY KEY (publisher, number)
) STRICT, WITHOUT ROWID;

CREATE TABLE subscriptions (
    id          TEXT PRIMARY KEY,
    pattern     TEXT NOT NULL,
    mode        TEXT NOT NULL,
    spec        TEXT NOT NULL,
    floor       INTEGER NOT NULL,
    delivered   INTEGER NOT NULL,
    settled     TEXT NOT NULL,
    holder      TEXT NOT NULL,
    fence       INTEGER NOT NULL,
    lease_until INTEGER NOT NULL,
    created_at  INTEGER NOT NULL,
    active_at   INTEGER NOT NULL,
    acked       INTEGER NOT NULL,
    redelivered INTEGER NOT NULL,
    buried      INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- Deliveries in flight (token > 0, due at the end of the lease) or waiting (token 0, due at the end of the delay).
CREATE TABLE deliveries (
    subscription TEXT NOT NULL,
    seq          INTEGER NOT NULL,
    attempts     INTEGER NOT NULL,
    due_at       INTEGER NOT NULL,
    token        INTEGER NOT NULL,
    priority     INTEGER NOT NULL,
    key          TEXT,
    dead_letter  INTEGER,
    PRIMARY KEY (subscription, seq)
) STRICT, WITHOUT ROWID;
CREATE INDEX deliveries_by_due ON deliveries (subscription, due_at);
CREATE INDEX deliveries_by_key ON deliveries (subscription, key, seq) WHERE key IS NOT NULL;

-- `message` is the whole message as JSON, for a dead letter outlives it.
CREATE TABLE dead_letters (
    id            INTEGER PRIMARY KEY AUTOINCREMENT,
    subscription  TEXT NOT NULL,
    seq           INTEGER NOT NULL,
    topic         TEXT NOT NULL,
    type          TEXT,
    reason        TEXT NOT NULL,
    attempts      INTEGER NOT NULL,
    died_at       INTEGER NOT NULL,
    error         TEXT,
    stack         TEXT,
    handler       TEXT,
    redrives      INTEGER NOT NULL,
    redriving     INTEGER NOT NULL,
    redrive_error TEXT,
    message       TEXT NOT NULL
) STRICT;

CREATE TABLE gaps (
    number       INTEGER PRIMARY KEY,
    subscription TEXT NOT NULL,
    from_seq     INTEGER NOT NULL,
    to_seq       INTEGER NOT NULL,
    count        INTEGER NOT NULL,
    why          TEXT NOT NULL,
    at           INTEGER NOT NULL,
    told         INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX gaps_by_subscription ON gaps (subscription, told);

CREATE TABLE retention (
    pattern TEXT NOT NULL,
    dialect TEXT NOT NULL,
    limits  TEXT NOT NULL,
    PRIMARY KEY (pattern, dialect)
) STRICT, WITHOUT ROWID;

-- What lies at or below the seq `counted_to`, by topic. The tail above it is counted on demand.
CREATE TABLE topic_counts (
    topic             TEXT PRIMARY KEY,
    count             INTEGER NOT NULL,
    bytes             INTEGER NOT NULL,
    last_seq          INTEGER NOT NULL,
    last_published_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- Runs of seqs whose messages retention deleted. What is missing and not in here was not deleted by Headwater. No two
-- runs overlap or touch.
CREATE TABLE pruned (
    from_seq INTEGER PRIMARY KEY,
    to_seq   INTEGER NOT NULL
) STRICT;

-- The last batch that a sink published, so that a batch it repeats is known.
CREATE TABLE sinks (
    sink  TEXT PRIMARY KEY,
    batch INTEGER NOT NULL,
    at    INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- How long deliveries took, as a histogram for each hour: `count` messages came to the `stage` 'deliver' or 'ack' in a
-- time of this bucket (delivery/histogram.py).
CREATE TABLE timings (
    subscription TEXT NOT NULL,
    hour         INTEGER NOT NULL,
    stage        TEXT NOT NULL,
    bucket       INTEGER NOT NULL,
    count        INTEGER NOT NULL,
    PRIMARY KEY (subscription, hour, stage, bucket)
) STRICT, WITHOUT ROWID;
CREATE INDEX timings_by_hour ON timings (hour);

-- The log's figures over time, as JSON: for each `step` between two of them, in milliseconds, a ring of rows whose oldest
-- one is replaced (broker/history.py).
CREATE TABLE samples (
    step    INTEGER NOT NULL,
    slot    INTEGER NOT NULL,
    at      INTEGER NOT NULL,
    figures TEXT NOT NULL,
    PRIMARY KEY (step, slot)
) STRICT, WITHOUT ROWID;

CREATE TABLE leases (
    resource TEXT PRIMARY KEY,
    owner    TEXT NOT NULL,
    fence    INTEGER NOT NULL,
    until    INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- Facts about the log itself: schema_version, salt, created_at, counted_to.
CREATE TABLE headwater (
    name  TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- Every message with its id filled in, for reading with plain SQL. The id of a message that was given none is a UUIDv7
-- of its time, the log's salt and its seq.
CREATE VIEW history AS
SELECT
    seq, coalesce(id, printf(
        '%08x-%04x-7%03x-%04x-%012x', published_at >> 16, published_at & 65535,
        (SELECT value FROM headwater WHERE name = 'salt') >> 14,
        32768 | ((SELECT value FROM headwater WHERE name = 'salt') & 16383), seq
    )) AS id,
    topic, data, type, version, "from", "to", reply_to, correlation_id, content_type, traceparent, headers, priority,
    deliver_at, expires_at, published_at, size
FROM messages;
