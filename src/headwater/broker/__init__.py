"""Use cases over the ports: publish, consume, dead letters, live feed, maintenance."""
