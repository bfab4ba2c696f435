"""Starting Spark: a Java, a JVM without detours, and a session with settings that suit a log."""
