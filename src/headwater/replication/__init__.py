"""SQLite databases kept on a server by pages: pushes, versions, claims, pulls."""

DIRECTORY_SUFFIX = "-replicas"  # of the data directory, after the name of the log of its server
