"""Proving from the data that the lake holds what the log had."""
