"""The data source `headwater`: the log, and the tables beside it, as DataFrames and streams."""
