"""Clocks, records and machine description that the benchmarks share."""

import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def time_interleaved(
    contestants: dict[str, Callable[[], object]], repeats: int, clock=time.perf_counter
) -> dict[str, list[float]]:
    """Seconds per call of each contestant: one warm-up each, then turn by turn, so that whatever
    else the machine does falls on all alike."""
    for call in contestants.values():
        call()
    seconds = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, call in contestants.items():
            begin = clock()
            call()
            seconds[name].append(clock() - begin)
    return seconds


def statistics_ms(seconds: list[float]) -> dict[str, float]:
    """Median, p10 and p90 in milliseconds, as the records spell them."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return {
        "ms": round(statistics.median(ordered) * 1e3, 4),
        "p10": round(ordered[round(0.1 * last)] * 1e3, 4),
        "p90": round(ordered[round(0.9 * last)] * 1e3, 4),
    }


def describe_machine() -> dict:
    """CPU and GPU as far as this process sees them."""
    machine = {
        "cpu": _cpu_model(),
        "cores": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpu": None,
        "count": 0,
        "driver": None,
    }
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name(0)
        machine["count"] = torch.cuda.device_count()
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        output = subprocess.run(query, capture_output=True, text=True).stdout.split()
        machine["driver"] = output[0] if output else None
    return machine


def write_results(what: str, records: list[dict], folder: Path = RESULTS) -> Path:
    """`<date>-<what>.json` in `folder`, with the machine and commit it was measured at."""
    folder.mkdir(parents=True, exist_ok=True)
    today = date.today().isoformat()
    path = folder / f"{today}-{what}.json"
    document = {
        "commit": _commit(),
        "date": today,
        "machine": describe_machine(),
        "records": records,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def _commit() -> str:
    command = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=12",
    ]
    output = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    if output:
        return output
    from mok import _build_info

    return _build_info.COMMIT


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
