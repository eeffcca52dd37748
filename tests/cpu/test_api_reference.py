"""docs/api.md is what the docstrings say, and every public name has one."""

import functools
import importlib
import re
import subprocess
import sys
from pathlib import Path

import torch

import mok
import mok.convert
import mok.functional
from mok.shapes import GRADIENT_ORDER

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools/api_reference.py"


def test_the_reference_is_current():
    result = subprocess.run([sys.executable, str(TOOL), "--check"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_a_stale_reference_is_found(tmp_path):
    for folder in ("mok", "tools"):
        for source in (ROOT / folder).rglob("*.py"):
            target = tmp_path / source.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(source.read_text())
    (tmp_path / "docs").mkdir()
    tool = tmp_path / "tools/api_reference.py"
    command = [sys.executable, str(tool)]
    assert subprocess.run([*command, "--check"], capture_output=True).returncode == 1
    assert subprocess.run(command).returncode == 0
    assert (tmp_path / "docs/api.md").read_text() == (ROOT / "docs/api.md").read_text()
    ops = tmp_path / "mok/ops.py"
    ops.write_text(ops.read_text().replace("A whole expert-parallel", "An expert-parallel"))
    result = subprocess.run([*command, "--check"], capture_output=True, text=True)
    assert result.returncode == 1
    assert "run python tools/api_reference.py" in result.stdout


def test_every_public_name_is_in_it():
    text = (ROOT / "docs/api.md").read_text()
    errors = [name for name in mok.__all__ if name.endswith("Error")]
    names = [f"mok.{name}" for name in mok.__all__ if name not in ("__version__", *errors)]
    names.remove("mok.reference")
    names += [f"mok.errors.{name}" for name in errors]
    names += [f"mok.router.{name}" for name in mok.router.__all__]
    names += [f"mok.functional.{n}" for n in ("MoKConfig", "forward", "backward", "build_schedule")]
    names += ["mok.convert.from_transformers", "mok.workspace.declare", "mok.workspace.Workspace"]
    missing = [name for name in names if f"### {name}\n" not in text]
    assert not missing


def resolved(name: str):
    """What a dotted name stands for, by import and getattr as a user would."""
    first, *rest = name.split(".")
    return functools.reduce(getattr, rest, importlib.import_module(first))


def test_every_heading_is_a_name_that_exists():
    text = (ROOT / "docs/api.md").read_text()
    names = re.findall(r"^### (.+)$", text, re.MULTILINE)
    assert len(names) > 50
    assert len(names) == len(set(names))
    for name in names:
        assert callable(resolved(name)), name
        assert not any(part.startswith("_") for part in name.split(".")), name


def test_the_ops_are_described_as_they_are_registered():
    text = (ROOT / "docs/api.md").read_text()
    for name in ("moe_forward", "moe_recompute", "moe_backward", "router_top_k"):
        found = re.search(rf"^### torch.ops.mok.{name}\n\n```text\n(.*?)\n\n", text, re.M | re.S)
        schema = str(getattr(torch.ops.mok, name).default._schema)
        assert " ".join(found[1].split()) == schema.removeprefix("mok::"), name
    for bit, name in enumerate(GRADIENT_ORDER):
        assert f"| {bit} | `{name}` |\n" in text
