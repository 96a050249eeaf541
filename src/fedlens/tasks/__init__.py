"""Tasks: what a sample is, how a batch is made from it, and what is minimised and measured."""
