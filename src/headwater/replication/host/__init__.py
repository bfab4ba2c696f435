"""The server's side: the data directory with its replicas and versions, and the paths under `/sapi/`."""
