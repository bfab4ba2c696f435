"""The public classes. `_async` is the source; `tools/generate_sync.py` makes `_sync` from it."""
