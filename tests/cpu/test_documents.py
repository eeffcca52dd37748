"""README and docs: every Python example runs, every link and file named exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

EXAMPLES = [
    pytest.param(match[1], id=f"{path.name}-{number}")
    for path in DOCUMENTS
    for number, match in enumerate(
        re.finditer(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
    )
]


@pytest.mark.parametrize("source", EXAMPLES)
def test_examples_run(source):
    names: dict = {}
    exec(compile(source, "example", "exec"), names)
    outputs = [names[name] for name in ("out", "out_TH", "result") if name in names]
    assert outputs, "an example ends in out, out_TH or result"
    for output in outputs:
        assert output.ok if hasattr(output, "ok") else output.isfinite().all()


def test_there_are_examples_of_the_three_doors():
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    for door in ("mok.MoELayer(", "mok.moe(", "torch.ops.mok."):
        assert any(door in block for block in blocks), door


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_files_exist(path):
    text = path.read_text()
    for target in re.findall(r"\]\(([^)#]+)(?:#[\w-]*)?\)", text):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path.name} links to {target}"
    for name in re.findall(r"`((?:csrc|mok|tests|tools|docs|benchmarks|examples)/[\w./]+)`", text):
        file = ROOT / name
        compiled = file.suffix == ".so" or name == "mok/_C"
        assert compiled or file.exists(), f"{path.name} names {name}"


def test_every_environment_variable_is_explained():
    documented = set(re.findall(r"MOK_[A-Z_]+", "".join(p.read_text() for p in DOCUMENTS)))
    sources = [*(ROOT / "csrc").rglob("*.cpp"), *(ROOT / "mok").glob("*.py")]
    pattern = r"(?:getenv\(|environ\.get\(|environ\[)\s*\"(MOK_[A-Z_]+)"
    used = {name for path in sources for name in re.findall(pattern, path.read_text())}
    assert used
    assert used <= documented
