"""The environment of a run: versions, machine, and the commit of the code."""

import json
import os
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from fedlens import __version__

COMMIT = "FEDLENS_COMMIT"  # names the commit of code that was copied without its history


def environment() -> dict[str, str]:
    """Return the facts that a reader needs to reproduce a run."""
    return {
        "fedlens": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": f"{platform.system()}-{platform.machine()}-with-{''.join(platform.libc_ver()) or platform.release()}",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine(),
        "threads": str(torch.get_num_threads()),
    }


def commit() -> str:
    """Return the commit of this code, with "+changes" if files differ from it, or "unknown"."""
    return os.environ.get(COMMIT) or commit_of(Path(__file__).parents[1]) or _installed_commit() or "unknown"


@cache
def commit_of(package: Path) -> str | None:
    """Return the commit of the checkout that tracks this package's files; None for an environment inside another repository."""
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    head, changed = _git(package, "rev-parse", "HEAD"), _git(package, "status", "--porcelain", "--untracked-files=no", "--", ".")
    return head and head + ("+changes" if changed else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):  # no git here
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _installed_commit() -> str | None:
    """Return the commit that `pip install git+https://…` recorded."""
    try:
        record = metadata.distribution("fedlens").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    commit = json.loads(record or "{}").get("vcs_info", {}).get("commit_id")
    return str(commit) if commit else None
