"""The steps of a run: datasets wired to the lake and the log."""
