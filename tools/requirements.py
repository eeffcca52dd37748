"""Prints requirements of pyproject.toml, one a line.

    python tools/requirements.py build test demo

`build` is what building without isolation needs; other words are optional dependency groups. So a
set-up can install what mok needs before, and without, mok itself.
"""

import sys
import tomllib
from pathlib import Path


def requirements(groups: list[str]) -> list[str]:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    known = {"build": project["build-system"]["requires"]}
    known |= project["project"]["optional-dependencies"]
    return list(dict.fromkeys(requirement for group in groups for requirement in known[group]))


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
