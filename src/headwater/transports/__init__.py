"""Carriers of copies to other systems, one file per target; and three that wrap others: several at once, a circuit
breaker, batches. Nothing here is imported before it is used, so that no target costs those who have another."""
