"""What a push subscription reports, and when."""

from headwater.errors import NotADatabaseError, ReplicationFailedError, UnreachableError, VersionConflictError
from headwater.replication.connection import as_partial
from headwater.replication.subscription import REPORT_AFTER_MS, PendingReport, kind_of


def test_a_network_failure_is_reported_once_when_it_has_lasted_five_minutes() -> None:
    reports = PendingReport()
    for now_ms in range(0, REPORT_AFTER_MS, 30_000):
        reports.note_failure(now_ms, "connection refused", "network")
        assert reports.pending is None
    reports.note_failure(REPORT_AFTER_MS, "connection refused", "network")
    report = reports.pending
    assert report is not None
    assert (report.kind, report.since) == ("network", 300.0)
    reports.sent(report)
    reports.note_failure(2 * REPORT_AFTER_MS, "still refused", "network")
    assert reports.pending is None


def test_success_begins_anew() -> None:
    reports = PendingReport()
    reports.note_failure(0, "away", "network")
    reports.note_success()
    reports.note_failure(REPORT_AFTER_MS, "away again", "network")
    assert reports.pending is None


def test_a_partial_sync_is_reported_at_once_and_each_time() -> None:
    reports = PendingReport()
    for now_ms in (0, 1_000):
        reports.note_failure(now_ms, "cut off", "partial")
        report = reports.pending
        assert report is not None
        assert report.kind == "partial"
        reports.sent(report)


def test_what_could_not_be_sent_waits_and_the_newest_stays() -> None:
    reports = PendingReport()
    reports.note_failure(0, "first", "partial")
    first = reports.pending
    reports.note_failure(1_000, "second", "partial")
    assert first is not None
    reports.sent(first)  # too late: it is the second that waits now
    assert reports.pending is not None
    assert reports.pending.error == "second"


def test_kinds() -> None:
    assert kind_of(VersionConflictError("newer", newest=4)) == "conflict"
    assert kind_of(as_partial(UnreachableError("broke"))) == "partial"
    assert kind_of(as_partial(ReplicationFailedError("broke"))) == "partial"
    assert kind_of(UnreachableError("away")) == "network"
    assert kind_of(NotADatabaseError("gone")) == "local"
