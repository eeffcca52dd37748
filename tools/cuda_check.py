"""Compiles every CUDA source for all its own architectures, without torch, Python or a GPU, and
looks at what ptxas says of the kernels: no spills, no serialised wgmma (tools/ptxas_report.py).

CI's check: an install builds only what MOK_CUDA_ARCHS names. Where nvcc is missing, `--fetch` takes
one of NVIDIA's Python packages (250 MB) into the build folder; without it, or where that fails, the
check says so and passes.
"""

import dataclasses
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools import native_build, ptxas_report  # noqa: E402

ALL_ARCHS = ("90a", "100f", "103a")

# A compiler's parts must be of one version.
NVCC_PACKAGES = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
)
FETCH_LIMIT_S = 300


def report_file(config: native_build.Config, source: Path) -> Path:
    """What nvcc and ptxas have said of a source."""
    return Path(f"{config.object_file(source)}.log")


def ninja_file(config: native_build.Config) -> str:
    """Every CUDA source and, beside its object, the report."""
    assert config.cuda is not None
    ninja = native_build.NinjaFile()
    nvcc = shlex.quote(str(config.cuda.nvcc)).replace("$", "$$")
    command = f"{nvcc} -MD -MF $out.d $flags -c $in -o $out"
    ninja.rule("nvcc", f"{command} > $out.log 2>&1 || {{ cat $out.log; exit 1; }}", depfile=True)
    for source in native_build.compiled_cuda_sources(config):
        flags = [*native_build.nvcc_flags(config, source), "-Xptxas", "-v", f"-I{config.root}"]
        ninja.build(config.object_file(source), "nvcc", [source], flags)
    return ninja.text()


def check(config: native_build.Config) -> list[str]:
    """Compiles what has changed. Returns the problems of all kernels, each with its source; raises
    native_build.BuildError where a source does not compile."""
    sources = native_build.compiled_cuda_sources(config)
    if not sources:
        return []
    native_build.run_ninja(config, ninja_file, [config.object_file(each) for each in sources])
    found = []
    for source in sources:
        report = report_file(config, source).read_text()
        name = source.relative_to(config.root)
        found += [f"{name}: {problem}" for problem in ptxas_report.problems(report)]
    return found


def fetch_toolkit(folder: Path) -> tuple[native_build.Cuda | None, str]:
    """nvcc from NVIDIA's Python packages, into `folder`; or None and the reason."""
    home = folder / "nvidia" / "cu13"
    if not (home / "bin" / "nvcc").exists():
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        command += ["--no-deps", "--upgrade", "--target", str(folder), *NVCC_PACKAGES]
        try:
            subprocess.run(command, check=True, timeout=FETCH_LIMIT_S)
        except (subprocess.SubprocessError, OSError) as error:
            return None, f"nvcc could not be fetched ({type(error).__name__})"
    return native_build.find_toolkit(os.environ | {"CUDA_HOME": str(home)})


def main(arguments: list[str]) -> None:
    cuda, reason = native_build.find_toolkit(os.environ)
    if cuda is None and "--fetch" in arguments:
        print(f"{reason}: fetching {NVCC_PACKAGES[0]}", flush=True)
        cuda, reason = fetch_toolkit(ROOT / "build" / "nvcc")
    if cuda is None:
        print(f"CUDA sources were not compiled: {reason}")
        return
    cuda = dataclasses.replace(cuda, archs=ALL_ARCHS)
    config = native_build.Config(ROOT, ROOT / "build" / "cuda-check", None, cuda)
    if found := check(config):
        sys.exit("\n".join(found))
    count = len(native_build.compiled_cuda_sources(config))
    archs = ", ".join(f"sm_{arch}" for arch in ALL_ARCHS)
    print(
        f"{count} CUDA sources compile, no kernel spills beyond what is known ({reason}; {archs})"
    )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except native_build.BuildError as error:
        sys.exit(str(error))
