"""Publishing a DataFrame into a log: checked and staged by the tasks, promoted in one transaction by the driver."""
