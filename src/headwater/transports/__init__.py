"""Carriers of copies to other systems, one file per target; and three that wrap others: several at once, a circuit
breaker, batches. Each is imported when it is used, so that only its users need its packages."""
