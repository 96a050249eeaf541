"""Where figures come from: versions, machine, and the commit of the code that made them."""

import json
import os
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from fedlens import __version__

COMMIT = "FEDLENS_COMMIT"  # says the commit where the code was copied without its history


def environment() -> dict[str, str]:
    """What a reader needs to know about where the figures come from."""
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
    """The commit of this code, with "+changes" where files differ from it; "unknown" where nothing tells."""
    return os.environ.get(COMMIT) or commit_of(Path(__file__).parents[1]) or _installed_commit() or "unknown"


@cache
def commit_of(package: Path) -> str | None:
    """Of a checkout that this package's files belong to; an environment inside some other repository is not one."""
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
    """`pip install git+https://…` writes down what it took."""
    try:
        found = metadata.distribution("fedlens").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    said = json.loads(found or "{}").get("vcs_info", {}).get("commit_id")
    return str(said) if said else None
