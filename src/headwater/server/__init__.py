"""A server of a log: authentication, JSON-RPC methods, HTTP pages and mounts on one port."""
