"""What studies came to, for readers: a page, and the files that go into papers."""
