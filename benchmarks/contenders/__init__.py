"""One small file a framework: each does the work of common.py its own way. ../frameworks.py runs them."""
