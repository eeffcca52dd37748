"""What this repository's sources look like: layers, file sizes, where assembly and torch may be."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("csrc", "mok", "tests", "benchmarks", "examples", "tools", ".ci", "docs")
CODE = {".h", ".cuh", ".cpp", ".cu", ".py", ".sh"}

SOFT_CAP = 400
HARD_CAP = 800
# Files above the soft cap, each with the reason why splitting it would make it worse.
LONG_FILES: dict[str, str] = {}

# From the lowest to the highest, as in docs/architecture.md.
LAYERS = (
    *("emu", "ptx", "layout", "schedule", "comm", "symm"),
    *("gemm", "kernels", "launch", "cpu", "bindings"),
)

ASSEMBLY = r"\b(asm|__asm__)\b\s*(volatile|__volatile__)?\s*\("
TORCH_OR_PYTHON = r'#\s*include\s*["<](torch|ATen|c10|pybind11|Python\.h)\b'
TORCH = r'#\s*include\s*["<](torch|ATen|c10)\b'
RULER = r"^\s*(//[/!]?|\*|/\*).*([-=*~_#/+])\2{5,}|^\s*//[/!]?\s*[-=*~_#+]{3,}\s*$"
UNFINISHED = r"\b(TODO|FIXME|XXX|HACK)\b"
PACKAGE_REGISTRIES = (
    "pypi",
    "pythonhosted",
    "download.pytorch",
    "conda.anaconda",
    "ghcr",
    "docker",
)


def source_files() -> list[Path]:
    """What belongs to the repository: git's list where there is one, else what lies there."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0:
        paths = [ROOT / line for line in listed.stdout.splitlines()]
        return [path for path in paths if path.is_file()]
    return [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]


def code_files(*folders: str) -> list[Path]:
    wanted = [ROOT / folder for folder in folders or FOLDERS]
    return [
        path
        for path in source_files()
        if path.suffix in CODE and any(folder in path.parents for folder in wanted)
    ]


def matches(paths: list[Path], pattern: str, base: Path = ROOT) -> list[str]:
    """`file:line: text` wherever the pattern is found."""
    found = []
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(pattern, line):
                found.append(f"{path.relative_to(base)}:{number}: {line.strip()}")
    return found


def included_layers(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*["<]csrc/(\w+)/', path.read_text(), re.MULTILINE)


def test_there_is_something_to_check():
    assert len(code_files("csrc")) > 10
    assert len(code_files("mok")) > 5


def test_assembly_is_in_ptx_device_only():
    paths = [path for path in code_files("csrc") if ROOT / "csrc/ptx/device" not in path.parents]
    assert not matches(paths, ASSEMBLY)


def test_torch_and_pybind11_are_in_bindings_only():
    paths = [path for path in code_files("csrc") if ROOT / "csrc/bindings" not in path.parents]
    assert not matches(paths, TORCH_OR_PYTHON)
    assert not matches(code_files("csrc/bindings/python"), TORCH)


def test_nothing_includes_from_a_layer_above_its_own():
    wrong = []
    for path in code_files("csrc"):
        layer = path.relative_to(ROOT / "csrc").parts[0]
        assert layer in LAYERS, f"{path} lies in no layer of docs/architecture.md"
        for included in included_layers(path):
            assert included in LAYERS, f"{path} includes csrc/{included}, which is no layer"
            if LAYERS.index(included) > LAYERS.index(layer):
                wrong.append(f"{path.relative_to(ROOT)} ({layer}) includes from {included}")
    assert not wrong


def test_includes_start_at_the_repository_root():
    ours = {path.name for path in code_files("csrc")}
    pattern = re.compile(r'#\s*include\s*"(?!csrc/)([^"]+)"')
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in code_files("csrc")
        for name in pattern.findall(path.read_text())
        if Path(name).name in ours
    ]
    assert not wrong


def test_files_are_short():
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in code_files()
    }
    assert not {name: length for name, length in lengths.items() if length > HARD_CAP}
    over = {name for name, length in lengths.items() if length > SOFT_CAP}
    assert over == set(LONG_FILES), "split them, or give a reason in LONG_FILES; drop old entries"


def test_nothing_is_left_for_later():
    this_file = Path(__file__).resolve()
    paths = [path for path in code_files() if path.resolve() != this_file]
    assert not matches(paths, UNFINISHED)


def test_comments_have_no_rulers():
    paths = [path for path in code_files() if path.suffix in {".h", ".cuh", ".cpp", ".cu"}]
    assert not matches(paths, RULER)


def test_no_package_registry_is_named():
    this_file = Path(__file__).resolve()
    names = "|".join(map(re.escape, PACKAGE_REGISTRIES))
    pattern = rf"https?://[\w.-]*({names})|--(extra-)?index-url|--find-links"
    paths = [path for path in source_files() if path.suffix in CODE | {".md", ".toml", ".txt", ""}]
    paths = [path for path in paths if path.resolve() != this_file and path.name != "LICENSE"]
    assert not matches(paths, pattern)


def test_every_test_file_is_collected():
    """pytest leaves out folders by name ("dist" is one), and says nothing about it."""
    ours = {path for path in code_files("tests") if path.name.startswith("test_")}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests",
    ]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    collected = {ROOT / line.split("::")[0] for line in output.splitlines() if "::" in line}
    missing = sorted(str(path.relative_to(ROOT)) for path in ours - collected)
    assert not missing


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (ASSEMBLY, '    asm volatile("nop;");'),
        (ASSEMBLY, '    __asm__("nop");'),
        (TORCH_OR_PYTHON, "#include <pybind11/pybind11.h>"),
        (TORCH_OR_PYTHON, "# include <Python.h>"),
        (TORCH, '#include "torch/csrc/stable/library.h"'),
        (RULER, "// ---- clusters ----------"),
        (RULER, "    // ---"),
        (RULER, "/**********"),
        (UNFINISHED, "// TODO(me): more"),
    ],
)
def test_the_patterns_find_what_they_are_for(pattern, text, tmp_path):
    planted = tmp_path / "planted.cpp"
    planted.write_text(f"// a line before\n{text}\n")
    (hit,) = matches([planted], pattern, base=tmp_path)
    assert hit.startswith("planted.cpp:2: ")
