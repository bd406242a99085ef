"""Prints what an image installs beside aotcache's own wheel: `python scripts/requirements.py api|builder`.

The service opens no artifact and compiles none, so its image goes without torch and what only
torch's users need. tests/test_images.py starts the service where these cannot be imported.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent

WITHOUT = {"torch", "safetensors", "pyelftools"}
"""Dependencies of aotcache that the service never imports."""


def requirements(image: str) -> list[str]:
    """Requirement lines for `api` or `builder`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed: list[str] = project["dependencies"]
    if image == "api":
        kept = [line for line in listed if re.split(r"[^\w-]", line)[0] not in WITHOUT]
        return kept + project["optional-dependencies"]["server"]
    # A plain torch for Linux brings gigabytes of CUDA; constraints.txt says which one CI runs.
    pins = (ROOT / "constraints.txt").read_text()
    torch = re.search(r"^torch==(\S+)", pins, re.MULTILINE)
    if torch is None:
        raise SystemExit("constraints.txt pins no torch")
    return [f"torch=={torch[1]}+cpu" if re.match(r"torch\b", line) else line for line in listed]


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in ("api", "builder"):
        raise SystemExit("usage: python scripts/requirements.py api|builder")
    sys.stdout.write("\n".join(requirements(sys.argv[1])) + "\n")
