"""JSON-RPC 2.0 over WebSocket without I/O, for both ends."""
