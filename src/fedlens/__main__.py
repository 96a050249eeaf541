"""`python -m fedlens` is `fedlens`."""

from fedlens.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
