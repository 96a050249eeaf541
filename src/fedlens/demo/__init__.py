"""The demo: the method on one HTML page, from runs on the embedded data."""
