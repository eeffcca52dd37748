"""The package as people get it: a wheel, an sdist, and what they read when something is missing.

MOK_TEST_WHEEL names a wheel to test; without it one is built here, from what is compiled already.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import mok

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "mok"

FORWARD = """
import sys, torch, mok
assert mok.__file__.startswith(sys.argv[1]), mok.__file__
torch.manual_seed(0)
x = torch.randn(5, 16, dtype=torch.bfloat16)
layer = mok.MoELayer(16, 8, 4, 2, dtype=torch.bfloat16)
with torch.no_grad():
    for parameter in layer.parameters():
        parameter.uniform_(-1, 1)
out = layer(x)
out.float().sum().backward()
grads = [p.grad.float().norm().item() for p in layer.parameters()]
print("norms", out.float().norm().item(), *grads)
"""


def run_python(*args: str, path: Path | str = "", cwd: Path) -> subprocess.CompletedProcess:
    """Runs this Python with `path` in front of its module search path."""
    env = {**os.environ, "PYTHONPATH": str(path)}
    command = [sys.executable, *args]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def needed_libraries(library: Path) -> list[str]:
    """What the dynamic linker loads with this library."""
    output = subprocess.run(
        ["readelf", "--dynamic", str(library)], capture_output=True, text=True, check=True
    ).stdout
    return re.findall(r"\(NEEDED\).*\[(.*)\]", output)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    if "MOK_TEST_WHEEL" in os.environ:
        return Path(os.environ["MOK_TEST_WHEEL"])
    folder = tmp_path_factory.mktemp("wheel")
    arguments = ["-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", str(folder)]
    result = run_python(*arguments, str(ROOT), cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = folder.glob("mok-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder with the wheel's contents and nothing else of mok."""
    target = tmp_path_factory.mktemp("site")
    arguments = ["-m", "pip", "install", "--no-deps", "--target", str(target), str(wheel)]
    result = run_python(*arguments, cwd=target)
    assert result.returncode == 0, result.stdout + result.stderr
    return target


@pytest.fixture
def sources_only(tmp_path) -> Path:
    """A folder with mok's Python files, as a source checkout has them before any build."""
    compiled = shutil.ignore_patterns("*.so", "_build_info.py", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "mok", ignore=compiled)
    return tmp_path


def fake_torch(folder: Path, text: str) -> Path:
    """A folder whose `import torch` runs `text`."""
    folder.mkdir()
    (folder / "torch.py").write_text(text)
    return folder


def test_the_wheel_runs_a_forward(installed, tmp_path):
    result = run_python("-c", FORWARD, str(installed), path=installed, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    norms = [float(word) for word in result.stdout.split()[1:]]
    assert all(0 < norm < 1e6 for norm in norms), result.stdout


def test_the_wheel_holds_what_it_needs(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    folders = {name.split("/")[0] for name in names}
    assert folders == {"mok", f"mok-{mok.__version__}.dist-info"}
    package = {name.removeprefix("mok/") for name in names if name.startswith("mok/")}
    sources = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")}
    assert sources | {"_build_info.py", "py.typed"} <= package
    scripts = zipfile.ZipFile(wheel).read(f"mok-{mok.__version__}.dist-info/entry_points.txt")
    assert "mok = mok.__main__:main" in scripts.decode()
    compiled = {name.split(".")[0] for name in package if name.endswith(".so")}
    assert compiled == {"libmok_core", "_C", "_ops"}
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert wheel.name.startswith(f"mok-{mok.__version__}-{python}-{python}-linux")
    metadata = zipfile.ZipFile(wheel).read(f"mok-{mok.__version__}.dist-info/METADATA").decode()
    assert "Requires-Dist: torch>=2.11" in metadata
    assert "License: Apache-2.0" in metadata or "License-Expression: Apache-2.0" in metadata


def test_each_library_loads_only_what_it_may(installed):
    core = needed_libraries(installed / "mok" / "libmok_core.so")
    (python_module,) = (installed / "mok").glob("_C.*.so")
    python_module = needed_libraries(python_module)
    torch_ops = needed_libraries(installed / "mok" / "_ops.so")
    assert "libmok_core.so" in python_module
    assert {"libmok_core.so", "libtorch_cpu.so"} <= set(torch_ops)
    for name in [*core, *python_module]:
        assert not re.match(r"lib(torch|c10|cuda|python|nccl)", name), name
    for name in torch_ops:
        assert not re.match(r"lib(c10|torch_python|cuda|python|nccl)", name), name


def test_import_works_before_any_build(sources_only):
    script = (
        # An editable install's finder would lend this copy the compiled half of the other one.
        "import sys\n"
        "ordinary = [f for f in sys.meta_path if 'Editable' not in getattr(f, '__name__', '')]\n"
        "sys.meta_path[:] = ordinary\n"
        "import mok, mok.reference\n"
        "print(mok.__version__, mok.reference.moe_reference.__name__, 'moe' in dir(mok))\n"
        "for name in ('moe', 'MoELayer', 'symm_empty', '_C', 'moe'):\n"
        "    try:\n"
        "        getattr(mok, name)\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
    )
    result = run_python("-c", script, path=sources_only, cwd=sources_only)
    assert result.returncode == 0, result.stderr
    first, *messages = result.stdout.splitlines()
    assert first == f"{mok.__version__} moe_reference True"
    assert len(messages) == 5, "each a line"
    assert len(set(messages)) == 1, "and each time the same"
    assert re.fullmatch(
        rf"the compiled half of mok is not in {sources_only}/mok; found torch 2\.\d+.*: run "
        r"'pip install --no-build-isolation \.' in mok's source folder\.",
        messages[0],
    )


@pytest.mark.parametrize(
    ("torch_source", "expected"),
    [
        (
            "raise ModuleNotFoundError(\"No module named 'torch'\")",
            r"mok needs torch >= 2\.11, and importing torch failed: No module named 'torch'; "
            r"install torch first\.",
        ),
        (
            "import types\n__version__ = '2.5.1'\nversion = types.SimpleNamespace(cuda='12.4')",
            r"mok needs torch >= 2\.11; found torch 2\.5\.1, CUDA 12\.4, Python .*: install a "
            r"newer torch, then rebuild mok\.",
        ),
    ],
    ids=["missing", "old"],
)
def test_import_works_without_a_usable_torch(sources_only, torch_source, expected):
    other = fake_torch(sources_only / "other", torch_source)
    script = "import mok\nprint(mok.__version__)\ntry: mok.moe\nexcept ImportError as e: print(e)"
    result = run_python("-c", script, path=f"{other}:{sources_only}", cwd=sources_only)
    assert result.returncode == 0, result.stderr
    version, message = result.stdout.splitlines()
    assert version == mok.__version__
    assert re.fullmatch(expected, message)


@pytest.mark.parametrize("name", ["_ops.so", "_C"])
def test_a_library_that_does_not_load_is_explained(installed, tmp_path, name):
    shutil.copytree(installed / "mok", tmp_path / "mok")
    (library,) = (tmp_path / "mok").glob(f"{name}*")
    library.write_bytes(b"not a library")
    script = "import mok\ntry: mok.moe\nexcept ImportError as e: print(e)"
    result = run_python("-c", script, path=tmp_path, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (message,) = result.stdout.splitlines()
    assert re.match(
        r"this copy of mok was built for torch 2\.\d+\S*, (without CUDA|CUDA \d+\.\d+ \(sm_.*\)), "
        r"Python 3\.\d+\.\d+, linux-\w+; found torch 2\.\d+\S*, .*; rebuild it here with ",
        message,
    )


@pytest.mark.parametrize("command", ["dist_info", "bdist_wheel", "build_ext"])
@pytest.mark.parametrize(
    ("torch_source", "found"),
    [
        ("raise ModuleNotFoundError(\"No module named 'torch'\")", "No module named 'torch'"),
        ("__version__ = '2.5.1'", "has torch 2.5.1"),
    ],
    ids=["missing", "old"],
)
def test_a_build_without_torch_ends_in_one_sentence(tmp_path, command, torch_source, found):
    other = fake_torch(tmp_path / "other", torch_source)
    result = run_python("-W", "ignore", "setup.py", "--quiet", command, path=other, cwd=ROOT)
    assert result.returncode != 0
    (sentence,) = result.stderr.strip().splitlines()
    assert sentence.startswith("mok compiles against the torch you run it with: first install it")
    assert "pip install --no-build-isolation ." in sentence
    assert found in sentence


def test_pip_shows_that_sentence_without_a_traceback(tmp_path):
    other = fake_torch(tmp_path / "other", "raise ModuleNotFoundError(\"No module named 'torch'\")")
    arguments = ["wheel", "--no-build-isolation", "--no-deps", "-w", str(tmp_path), str(ROOT)]
    result = run_python("-m", "pip", *arguments, path=other, cwd=tmp_path)
    assert result.returncode != 0
    assert "mok compiles against the torch you run it with" in result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr


def test_the_sdist_holds_all_sources(tmp_path):
    # Without torch: whoever packs sources needs none.
    other = fake_torch(tmp_path / "other", "raise ModuleNotFoundError(\"No module named 'torch'\")")
    arguments = ["--quiet", "sdist", "--dist-dir", str(tmp_path)]
    result = run_python("setup.py", *arguments, path=other, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    (archive,) = tmp_path.glob("mok-*.tar.gz")
    shutil.unpack_archive(archive, tmp_path, filter="data")
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    for folder in ("csrc", "mok", "tests", "tools", "examples", "docs"):
        for path in (ROOT / folder).rglob("*"):
            generated = path.suffix in (".so", ".pyc") or path.name == "_build_info.py"
            if path.is_file() and not generated:
                copy = unpacked / path.relative_to(ROOT)
                assert copy.exists(), f"{path.relative_to(ROOT)} is not in the sdist"
    for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md", "Makefile"):
        assert (unpacked / name).read_bytes() == (ROOT / name).read_bytes()
    assert not list(unpacked.rglob("*.so"))
    assert not (unpacked / "mok" / "_build_info.py").exists()


def test_type_checkers_see_what_is_exported():
    """py.typed promises types, and a checker cannot follow `__getattr__`."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    seen = {}
    for statement in block.body:
        assert isinstance(statement, ast.ImportFrom)
        for name in statement.names:
            assert name.asname == name.name, "only `import X as X` exports X"
            seen[name.name] = statement.module
    exports = {name: f"mok.{module}" for name, module in mok._EXPORTS.items()}
    assert seen == exports | dict.fromkeys(mok._PURE_SUBMODULES, "mok")
