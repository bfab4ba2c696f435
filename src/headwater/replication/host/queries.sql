-- Each query has a name and a line of purpose.

-- :replica: the columns of a replica r, with the size of its versions on disk
r.id, r.namespace, r.name, r.created_at, r.newest,
(SELECT count(*) FROM versions AS v WHERE v.replica = r.id),
(SELECT coalesce(sum(coalesce(v.delta_bytes, v.size)), 0) FROM versions AS v WHERE v.replica = r.id),
r.changed_at

-- :version: the columns of a version v
v.number, v.base, v.push_id, v.message, v.client, v.at, v.size, v.page_size, v.pages, v.changed_pages, v.wire_bytes,
v.dbhash, v.sha256, v.delta_bytes, v.delta_sha256, v.announced

-- :tables: how many tables the file has
SELECT count(*) FROM sqlite_schema

-- :integrity: whether the file is whole
PRAGMA integrity_check(3)

-- :replica_named: one replica by its name
SELECT {replica} FROM replicas AS r WHERE r.namespace = ? AND r.name = ?

-- :replica_with_id: one replica by its id
SELECT {replica} FROM replicas AS r WHERE r.id = ?

-- :replicas: all of them, by name
SELECT {replica} FROM replicas AS r ORDER BY r.namespace, r.name

-- :listing: of one namespace or all, after a name; each with its newest version, in one snapshot
SELECT {replica}, {version} FROM replicas AS r LEFT JOIN versions AS v ON v.replica = r.id AND v.number = r.newest
WHERE (r.namespace, r.name) > (?1, ?2) AND (?3 IS NULL OR r.namespace = ?3) ORDER BY r.namespace, r.name LIMIT ?4

-- :totals: the numbers of replicas and versions, and the size of these on disk
SELECT (SELECT count(*) FROM replicas), count(*), coalesce(sum(coalesce(v.delta_bytes, v.size)), 0) FROM versions AS v

-- :count_replicas: how many there are
SELECT count(*) FROM replicas

-- :add_replica: a new one without versions
INSERT INTO replicas (id, namespace, name, created_at) VALUES (?, ?, ?, ?)

-- :record_change: a client has announced changes
UPDATE replicas SET changed_at = ?3 WHERE namespace = ?1 AND name = ?2

-- :remove_replica: with its versions, keys and reports
DELETE FROM replicas WHERE id = ?

-- :versions: below a number, newest first
SELECT {version} FROM versions AS v WHERE v.replica = ? AND v.number < ? ORDER BY v.number DESC LIMIT ?

-- :numbers: of all versions, ascending
SELECT v.number FROM versions AS v WHERE v.replica = ? ORDER BY v.number

-- :one_version: by its number
SELECT {version} FROM versions AS v WHERE v.replica = ? AND v.number = ?

-- :versions_from: a version and all newer ones, ascending
SELECT {version} FROM versions AS v WHERE v.replica = ? AND v.number >= ? ORDER BY v.number

-- :set_newest: the compare-and-set of an acceptance: only if the newest is still the base
UPDATE replicas SET newest = ?3 WHERE id = ?1 AND newest = ?2 RETURNING newest

-- :set_delta: an older version is now kept as a delta
UPDATE versions SET delta_bytes = ?3, delta_sha256 = ?4 WHERE replica = ?1 AND number = ?2 RETURNING number

-- :add_version: the new newest
INSERT INTO versions (
    replica, number, base, push_id, message, client, at, size, page_size, pages, changed_pages, wire_bytes, dbhash, sha256
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- :remove_versions: the oldest, up to a number; never the newest
DELETE FROM versions WHERE replica = ?1 AND number <= ?2 AND number < (SELECT newest FROM replicas WHERE id = ?1)

-- :unannounced: versions without a message in the log yet, those of each replica in order
SELECT {replica}, {version} FROM versions AS v JOIN replicas AS r ON r.id = v.replica
WHERE v.announced = 0 ORDER BY r.id, v.number

-- :announced: a version has its message in the log
UPDATE versions SET announced = 1 WHERE replica = ? AND number = ?

-- :add_key: a key of a replica
INSERT INTO keys (replica, id, kind, sha256, label, created_at) VALUES (?, ?, ?, ?, ?, ?)

-- :set_keyed: from now on the replica needs a key
UPDATE replicas SET keyed = 1 WHERE id = ?

-- :keyed: whether it is
SELECT keyed FROM replicas WHERE id = ?

-- :keys: of a replica, oldest first
SELECT id, kind, label, created_at FROM keys WHERE replica = ? ORDER BY created_at, id

-- :one_key: the hash to compare a secret with
SELECT kind, sha256 FROM keys WHERE replica = ? AND id = ?

-- :count_keys: how many a replica has
SELECT count(*) FROM keys WHERE replica = ?

-- :remove_key: a key of a replica
DELETE FROM keys WHERE replica = ? AND id = ? RETURNING id

-- :add_report: an error report of a client
INSERT INTO reports (replica, at, client, document) VALUES (?, ?, ?, ?)

-- :trim_reports: keep the last so many, up to so many bytes in all; the last one always stays
DELETE FROM reports WHERE number IN (
    SELECT number FROM (
        SELECT number, row_number() OVER backwards AS place, sum(octet_length(document)) OVER backwards AS bytes
        FROM reports WHERE replica = ?1 WINDOW backwards AS (ORDER BY number DESC)
    ) WHERE place > ?2 OR (place > 1 AND bytes > ?3)
)

-- :reports: of a replica, newest first
SELECT at, client, document FROM reports WHERE replica = ? ORDER BY number DESC LIMIT ?
