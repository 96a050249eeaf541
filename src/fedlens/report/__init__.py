"""Reports for readers: one page, and the files that go into papers."""
