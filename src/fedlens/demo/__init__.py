"""The demo: the story of the method on one HTML page, from runs on the embedded data."""
