"""Engines: interchangeable ways to run the local steps of a cohort. The same plan gives the same updates in each."""
