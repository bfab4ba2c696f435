"""What to deliver, retry, bury, deduplicate and retain: pure decisions. No I/O, no clock; `now_ms` is passed in."""
