"""What the broker asks of the world: a Store, a Notifier, a Clock. The docstrings are the contract."""
