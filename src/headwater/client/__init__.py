"""A log behind a connection: the same verbs, carried to a server."""
