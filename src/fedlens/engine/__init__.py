"""Engines: interchangeable ways to execute a cohort's local steps. Same work in, same updates out."""
