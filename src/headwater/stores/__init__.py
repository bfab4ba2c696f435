"""Where a log is kept. Each store obeys `ports.store`; one contract suite runs over all of them."""
