"""`headwater pipeline`: the log's history as tables on Apache Spark."""

from headwater.cli.pipeline.app import pipeline

__all__ = ["pipeline"]
