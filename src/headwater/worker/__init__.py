"""Running the handlers of a module in processes: a supervisor starts them, watches them and starts them again."""
