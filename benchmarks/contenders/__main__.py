"""`python -m contenders MODULE JOB.json`: one contender in a process (or process tree) of its own."""

import json
import sys
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":
    module, job = sys.argv[1:]
    import_module(f"contenders.{module}").run(json.loads(Path(job).read_text()))
