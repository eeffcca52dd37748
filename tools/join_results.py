"""Puts the records of several benchmarks into one file.

    python tools/join_results.py FOLDER FILE.json

FOLDER holds files as benchmarks/_timing.py writes them, at any depth; the first one's commit, date
and machine stand for all, which are of one run.
"""

import json
import sys
from pathlib import Path


def join(folder: Path) -> dict | None:
    """The document, or None where the folder has no records."""
    joined = None
    for path in sorted(folder.rglob("*.json")):
        document = json.loads(path.read_text())
        if "records" not in document:
            continue  # a time line
        if joined is None:
            joined = document
        else:
            joined["records"] += document["records"]
    return joined


def main() -> None:
    folder, file = Path(sys.argv[1]), Path(sys.argv[2])
    document = join(folder)
    if document is None:
        print(f"{folder} has no records")
        return
    file.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{file}: {len(document['records'])} records")


if __name__ == "__main__":
    main()
