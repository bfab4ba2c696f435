"""The demo: what Headwater promises, shown with real processes and checked as it goes. `story.run()` tells it."""
