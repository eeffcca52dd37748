"""Builds mok's native part (tools/native_build.py) into an ordinary setuptools package."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # a PEP 517 front end runs this file without the folder on the path

from tools import native_build  # noqa: E402

# Commands that end in a compiled package. Only an sdist is made without torch.
COMPILING_COMMANDS = {
    "dist_info",
    "editable_wheel",
    "bdist_wheel",
    "build",
    "build_ext",
    "install",
    "develop",
}


def import_torch():
    """torch, or one sentence and the end of the build."""
    minimum = ".".join(map(str, native_build.MIN_TORCH))
    hint = (
        f"mok compiles against the torch you run it with: first install it (pip install "
        f"'torch>={minimum}'), then build with 'pip install --no-build-isolation .'"
    )
    try:
        import torch
    except ImportError as error:
        sys.exit(f"{hint} (this build's Python has no usable torch: {error}).")
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < native_build.MIN_TORCH:
        sys.exit(f"{hint} (this build's Python has torch {torch.__version__}).")
    return torch


def source_commit() -> str:
    """The commit of this checkout, "unknown" outside one (an unpacked sdist)."""
    if not (ROOT / ".git").exists():
        return "unknown"
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"
    except FileNotFoundError:
        return "unknown"


def install_file(source: Path, target: Path) -> None:
    """Copies by rename, so that a process which has the old library mapped keeps it whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    shutil.copy2(source, temporary)
    os.replace(temporary, target)


class BuildNative(build_ext):
    """Runs ninja and puts the libraries and `_build_info.py` into the package."""

    def run(self) -> None:
        torch = import_torch()
        try:
            cuda, reason = native_build.find_cuda(torch.version.cuda, os.environ)
            print(f"mok: building {'with' if cuda else 'without'} CUDA ({reason})", flush=True)
            tag = f"native-{sys.implementation.cache_tag}"
            torch_home = Path(torch.__file__).parent
            self.native = native_build.Config(ROOT, ROOT / "build" / tag, torch_home, cuda)
            native_build.build(self.native)
        except native_build.BuildError as error:
            sys.exit(f"mok: {error}")
        package = self.package_folder()
        for name, built in self.native.libraries.items():
            install_file(built, package / name)
        info = self.native.build_dir / "_build_info.py"
        info.write_text(self.build_info(torch, cuda))
        install_file(info, package / "_build_info.py")

    def package_folder(self) -> Path:
        return ROOT / "mok" if self.inplace else Path(self.build_lib) / "mok"

    def build_info(self, torch, cuda: native_build.Cuda | None) -> str:
        values = {
            "COMMIT": source_commit(),
            "TORCH_VERSION": str(torch.__version__),
            "CUDA_VERSION": cuda.version if cuda else None,
            "CUDA_ARCHS": cuda.archs if cuda else (),
            "PYTHON_VERSION": platform.python_version(),
            "PLATFORM": f"{sys.platform}-{platform.machine()}",
        }
        lines = [f"{name} = {value!r}" for name, value in values.items()]
        return (
            "\n".join(
                ['"""Written by setup.py: what this copy of mok was built from."""', "", *lines]
            )
            + "\n"
        )

    def get_outputs(self) -> list[str]:
        return list(self.get_output_mapping())

    def get_output_mapping(self) -> dict[str, str]:
        names = (self.get_ext_filename("_C"), "libmok_core.so", "_ops.so", "_build_info.py")
        return {
            str(Path(self.build_lib) / "mok" / name): str(ROOT / "mok" / name) for name in names
        }


class MokDistribution(Distribution):
    def parse_command_line(self):
        proceed = super().parse_command_line()
        # Before any dependency is fetched or any file compiled.
        if COMPILING_COMMANDS & set(self.commands):
            import_torch()
        return proceed


setup(
    license="Apache-2.0",
    ext_modules=[Extension("mok._C", sources=[])],
    cmdclass={"build_ext": BuildNative},
    distclass=MokDistribution,
)
