"""What to deliver, retry, dead-letter, deduplicate and retain: pure decisions. No I/O; the time is passed in."""
