"""The recipes of examples/recipes: each trains, and all to the same losses."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests._harness import run_ranks, run_ranks_fresh

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.py") if path.stem != "common")
RANKS = {"ddp_replicas": 4, "fsdp2": 4}


def recipe_job(rank, group, name):
    os.environ["BACKEND"] = "aot_eager"
    sys.path.insert(0, str(RECIPES))
    from mok import workspace

    losses = importlib.import_module(name).train(group)
    return losses, sorted(opened.name for opened in workspace.all_open())


@pytest.fixture(scope="module")
def one_rank():
    """The losses of the plain recipe on one rank."""
    ((losses, _),) = run_ranks_fresh(1, recipe_job, "expert_parallel")
    assert losses[-1] < 0.6 * losses[0]
    return losses


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_trains_alike(name, one_rank):
    num_ranks = RANKS.get(name, 2)
    for losses, names in run_ranks(num_ranks, recipe_job, name, timeout=180):
        assert losses == pytest.approx(one_rank, rel=2e-3), name
        assert len(names) == (2 if name == "interleaved" else 1), names


def test_a_recipe_runs_as_its_first_lines_say(one_rank):
    text = (RECIPES / "expert_parallel.py").read_text()
    (command,) = re.findall(r"^torchrun (.*)$", text, re.MULTILINE)
    environment = os.environ | {
        "PYTHONPATH": str(RECIPES.parents[1]),
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",  # the losses compared with are a CPU's
    }
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *command.split()],
        cwd=RECIPES.parents[1],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("loss:")]
    losses = [float(word) for word in line.split()[1:]]
    assert losses == pytest.approx(one_rank, rel=2e-3, abs=1e-4)


def test_every_recipe_names_its_command():
    for name in NAMES:
        text = (RECIPES / f"{name}.py").read_text()
        ranks = RANKS.get(name, 2)
        assert f"torchrun --nproc-per-node {ranks} examples/recipes/{name}.py" in text
