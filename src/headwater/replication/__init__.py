"""SQLite databases kept on a server by pages: pushes, versions, claims, pulls."""
