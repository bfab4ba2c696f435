"""A log served to others: who may connect, what they may do, and how the wire meets the broker."""
