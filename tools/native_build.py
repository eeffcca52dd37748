"""What is compiled from what: mok's three shared libraries as one ninja file.

    mok/libmok_core.so   csrc/ without bindings: no torch, no Python, no libcuda
    mok/_C.<abi>.so      csrc/bindings/python: pybind11 over the core, no torch header of its own
    mok/_ops.so          csrc/bindings/torch: torch ops on LibTorch's stable ABI, one binary for
                         every torch >= 2.11

setup.py runs it for an install, tools/cuda_check.py for CI's compile check, and
tools/emulator_build.py uses its parts. It imports neither setuptools nor torch.
"""

import dataclasses
import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

MIN_TORCH = (2, 11)
TORCH_TARGET_VERSION = "0x020b000000000000ull"
DEFAULT_CUDA_ARCHS = "90a"

# A CUDA source named sm90_*.cu holds instructions that only these chips have; a source of another
# name is built for all.
ARCH_FAMILIES = {"sm90": ("90",), "sm100": ("100", "103")}

# Folders of csrc whose C++ calls CUDA's driver or runtime.
CUDA_LAYERS = ("symm", "launch")

# Folders of csrc that only the emulator consists of (tools/emulator_build.py).
EMULATOR_FOLDERS = ("emu", "ptx/host", "launch/emulator", "cpu/emulator")


class BuildError(Exception):
    """One sentence for the person who builds."""


@dataclasses.dataclass(frozen=True)
class Cuda:
    """A usable CUDA toolkit and the architectures to build for, spelled without `sm_`."""

    home: Path
    version: str
    archs: tuple[str, ...]

    @property
    def nvcc(self) -> Path:
        return self.home / "bin" / "nvcc"

    @property
    def include_flags(self) -> list[str]:
        """For g++; nvcc knows its own folders (since CUDA 13 <cuda/std/...> is in include/cccl)."""
        folders = [self.home / "include", self.home / "include" / "cccl"]
        return [f"-isystem{folder}" for folder in folders if folder.is_dir()]


@dataclasses.dataclass(frozen=True)
class Config:
    """Where to build from and to; `torch_home` is the installed torch package's folder.

    Without a `torch_home` only the core library is built.
    """

    root: Path
    build_dir: Path
    torch_home: Path | None
    cuda: Cuda | None
    cxx: str = dataclasses.field(default_factory=lambda: os.environ.get("CXX", "g++"))

    @property
    def libraries(self) -> dict[str, Path]:
        """Name inside the package -> built file."""
        names = ["libmok_core.so"]
        if self.torch_home is not None:
            names += [f"_C{sysconfig.get_config_var('EXT_SUFFIX')}", "_ops.so"]
        return {name: self.build_dir / name for name in names}

    def object_file(self, source: Path) -> Path:
        return self.build_dir / "obj" / f"{source.relative_to(self.root)}.o"


def parse_archs(text: str) -> tuple[str, ...]:
    """`"90a 100f,103a"` -> `("90a", "100f", "103a")`."""
    archs = tuple(dict.fromkeys(re.split(r"[\s,;]+", text.strip()))) if text.strip() else ()
    for arch in archs:
        if not re.fullmatch(r"\d{2,3}[af]?", arch):
            raise BuildError(
                f"MOK_CUDA_ARCHS has {arch!r}: write numbers as nvcc does without 'sm_', "
                "for example '90a 100f 103a'."
            )
    if not archs:
        raise BuildError(
            "MOK_CUDA_ARCHS is empty: name at least one architecture, for example '90a'."
        )
    return archs


def source_archs(source: Path, archs: Iterable[str]) -> list[str]:
    """Those of `archs` that `source` is compiled for, by its name."""
    family = ARCH_FAMILIES.get(source.name.split("_")[0])
    return [arch for arch in archs if family is None or arch.rstrip("af") in family]


def gencode_flags(archs: Iterable[str]) -> list[str]:
    return [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]


def find_cuda(torch_cuda: str | None, env: Mapping[str, str]) -> tuple[Cuda | None, str]:
    """The toolkit to build with, or None and the reason in words.

    Whether a GPU is present plays no part. MOK_WITH_CUDA=0 turns CUDA off, =1 makes its absence an
    error.
    """
    wanted = env.get("MOK_WITH_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise BuildError(
            f"MOK_WITH_CUDA is {wanted!r}: use 0 (without CUDA), 1 (CUDA required) or leave it out."
        )
    if wanted == "0":
        return None, "MOK_WITH_CUDA=0"
    cuda, reason = _detect_cuda(torch_cuda, env)
    if cuda is None and wanted == "1":
        raise BuildError(f"MOK_WITH_CUDA=1, but {reason}.")
    return cuda, reason


def _detect_cuda(torch_cuda: str | None, env: Mapping[str, str]) -> tuple[Cuda | None, str]:
    if torch_cuda is None:
        return None, "the installed torch is a build without CUDA"
    cuda, reason = find_toolkit(env)
    if cuda is not None and cuda.version.split(".")[0] != torch_cuda.split(".")[0]:
        return (
            None,
            f"nvcc is {cuda.version}, torch was built with CUDA {torch_cuda}: majors differ",
        )
    return cuda, reason


def find_toolkit(env: Mapping[str, str]) -> tuple[Cuda | None, str]:
    """The CUDA toolkit of CUDA_HOME or PATH, whatever torch is; or None and the reason."""
    on_path = shutil.which("nvcc", path=env.get("PATH"))
    if env.get("CUDA_HOME"):
        home = Path(env["CUDA_HOME"])
    elif on_path:
        home = Path(on_path).resolve().parent.parent
    else:
        return None, "no nvcc was found (CUDA_HOME is unset and PATH has none)"
    if not (home / "bin" / "nvcc").exists():
        return None, f"CUDA_HOME={home} has no bin/nvcc"
    version = subprocess.run([home / "bin" / "nvcc", "--version"], capture_output=True, text=True)
    match = re.search(r"release (\d+\.\d+)", version.stdout)
    if match is None:
        return None, f"{home}/bin/nvcc --version names no release"
    archs = parse_archs(env.get("MOK_CUDA_ARCHS", DEFAULT_CUDA_ARCHS))
    return Cuda(home, match[1], archs), f"CUDA {match[1]} at {home}"


def core_sources(root: Path) -> tuple[list[Path], list[Path]]:
    """The core library's C++ and CUDA sources."""

    csrc = root / "csrc"
    others = {csrc / folder for folder in ("bindings", *EMULATOR_FOLDERS)}

    def find(pattern: str) -> list[Path]:
        return sorted(path for path in csrc.rglob(pattern) if others.isdisjoint(path.parents))

    return find("*.cpp"), find("*.cu")


def cxx_flags() -> list[str]:
    # FMA only where a source asks for it: left to the compiler, a loop's tail and its body would
    # round differently.
    flags = [
        "-std=c++20",
        "-O3",
        "-g0",
        "-fPIC",
        "-pthread",
        "-ffp-contract=off",
        "-Wall",
        "-Wextra",
        "-Wno-psabi",
    ]
    if os.environ.get("MOK_WERROR") == "1":
        flags.append("-Werror")
    return flags + shlex.split(os.environ.get("CXXFLAGS", ""))


def nvcc_flags(config: Config, source: Path) -> list[str]:
    assert config.cuda is not None
    host = "-fPIC,-pthread,-Wall"
    flags = [
        "-std=c++20",
        "-O3",
        "-Xcompiler",
        host,
        "--expt-relaxed-constexpr",
        "-ccbin",
        config.cxx,
    ]
    return flags + gencode_flags(source_archs(source, config.cuda.archs))


def standard_library_flags(cxx: str) -> list[str]:
    """Keeps one C++ runtime in the process.

    Where a compiler comes with libstdc++.a but without the libstdc++.so that it would link first,
    our libraries would carry and export a second runtime beside torch's, and crash in it (seen in
    the locales of string streams). The shared one that torch needs is there in any case.
    """
    command = [*shlex.split(cxx), "-print-file-name=libstdc++.so"]
    found = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return [] if os.path.isabs(found) else ["-l:libstdc++.so.6"]


class NinjaFile:
    """Collects build statements; paths may contain spaces."""

    def __init__(self) -> None:
        self.lines = ["ninja_required_version = 1.5"]

    def rule(self, name: str, command: str, depfile: bool = False) -> None:
        self.lines += [f"rule {name}", f"  command = {command}", f"  description = {name} $out"]
        if depfile:
            self.lines += ["  depfile = $out.d", "  deps = gcc"]

    def build(
        self, out: Path, rule: str, inputs: Iterable[Path], flags: Iterable[str], implicit=()
    ) -> Path:
        def escape(path: Path) -> str:
            return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")

        statement = f"build {escape(out)}: {rule} {' '.join(map(escape, inputs))}"
        if implicit:
            statement += f" | {' '.join(map(escape, implicit))}"
        joined = " ".join(shlex.quote(flag).replace("$", "$$") for flag in flags)
        self.lines += [statement, f"  flags = {joined}"]
        return out

    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


def ninja_file(config: Config) -> str:
    """The whole build; `config.libraries` are its outputs."""
    ninja = NinjaFile()
    cxx = shlex.quote(config.cxx).replace("$", "$$")
    ninja.rule("cxx", f"{cxx} -MD -MF $out.d $flags -c $in -o $out", depfile=True)
    ninja.rule("link", f"{cxx} -shared -o $out $in $flags")
    if config.cuda is not None:
        nvcc = shlex.quote(str(config.cuda.nvcc)).replace("$", "$$")
        ninja.rule("nvcc", f"{nvcc} -MD -MF $out.d $flags -c $in -o $out", depfile=True)
    cuda_sources = compiled_cuda_sources(config)
    common = [f"-I{config.root}", *_cuda_defines(cuda_sources)]

    def compile_cpp(sources: Iterable[Path], flags: list[str]) -> list[Path]:
        flags = cxx_flags() + common + flags
        return [ninja.build(config.object_file(s), "cxx", [s], flags) for s in sources]

    link_flags = [
        *("-pthread", "-Wl,-rpath,$ORIGIN"),
        *shlex.split(os.environ.get("LDFLAGS", "")),
    ]
    link_flags += standard_library_flags(config.cxx)
    cpp_sources = core_sources(config.root)[0]
    cuda_users = [source for source in cpp_sources if source.parent.name in CUDA_LAYERS]
    objects = compile_cpp([source for source in cpp_sources if source not in cuda_users], [])
    toolkit = [] if config.cuda is None else config.cuda.include_flags
    objects += compile_cpp(cuda_users, toolkit)
    core_flags = ["-Wl,-soname,libmok_core.so", "-Wl,-z,defs", "-ldl", "-lrt"]
    for source in cuda_sources:
        flags = nvcc_flags(config, source) + common
        objects.append(ninja.build(config.object_file(source), "nvcc", [source], flags))
    if cuda_sources:
        # The static runtime serves every torch of this CUDA major and needs no search path.
        core_flags = [f"-L{config.cuda.home / 'lib64'}", "-lcudart_static", *core_flags]
    core, *modules = config.libraries.values()
    ninja.build(core, "link", objects, [*core_flags, *link_flags])
    if config.torch_home is None:
        return ninja.text()

    python_module, torch_ops = modules
    link_core = [f"-L{config.build_dir}", "-lmok_core"]
    torch_include = [f"-isystem{config.torch_home / 'include'}"]  # pybind11's headers are there too
    bindings = config.root / "csrc" / "bindings"

    # pybind11's templates are most of the build's time, and nothing in them is hot.
    flags = ["-O1", *torch_include, f"-isystem{sysconfig.get_paths()['include']}"]
    objects = compile_cpp(sorted((bindings / "python").glob("*.cpp")), flags)
    ninja.build(python_module, "link", objects, [*link_core, *link_flags], implicit=[core])

    flags = [f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}", *torch_include]
    torch_libraries = [
        f"-L{config.torch_home / 'lib'}",
        "-Wl,--as-needed",
        "-ltorch",
        "-ltorch_cpu",
    ]
    if config.cuda is not None:
        flags += ["-DUSE_CUDA", *config.cuda.include_flags]
        torch_libraries.append("-ltorch_cuda")
    objects = compile_cpp(sorted((bindings / "torch").glob("*.cpp")), flags)
    flags = [*link_core, *torch_libraries, *link_flags]
    ninja.build(torch_ops, "link", objects, flags, implicit=[core])
    return ninja.text()


def compiled_cuda_sources(config: Config) -> list[Path]:
    """The CUDA sources that this build's architectures have a use for."""
    if config.cuda is None:
        return []
    sources = core_sources(config.root)[1]
    return [source for source in sources if source_archs(source, config.cuda.archs)]


def _cuda_defines(cuda_sources: Iterable[Path]) -> list[str]:
    """MOK_WITH_CUDA where this build has kernels; MOK_WITH_SM90, MOK_WITH_SM100 by family."""
    names = [source.name for source in cuda_sources]
    defines = ["-DMOK_WITH_CUDA"] if names else []
    return defines + [
        f"-DMOK_WITH_{f.upper()}"
        for f in ARCH_FAMILIES
        if any(n.startswith(f + "_") for n in names)
    ]


def find_ninja() -> str:
    beside_python = Path(sys.executable).parent / "ninja"
    ninja = str(beside_python) if beside_python.exists() else shutil.which("ninja")
    if ninja is None:
        raise BuildError(
            "mok is built by ninja and none was found: run 'pip install ninja' and try again."
        )
    return ninja


def build(config: Config, targets: Iterable[Path] = ()) -> None:
    """Brings `targets` (default: all libraries) up to date. Raises BuildError."""
    run_ninja(config, ninja_file, targets)


def run_ninja(config: Config, ninja_text: Callable[[Config], str], targets: Iterable[Path]) -> None:
    """Builds in `config.build_dir`; several processes take turns. Raises BuildError."""
    if shutil.which(config.cxx) is None:
        raise BuildError(
            f"the C++ compiler {config.cxx!r} was not found: install g++ 12 or newer "
            "(Debian: apt-get install g++) or set CXX."
        )
    config.build_dir.mkdir(parents=True, exist_ok=True)
    with open(config.build_dir / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        text = ninja_text(config)
        path = config.build_dir / "build.ninja"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
        command = [find_ninja(), "-C", str(config.build_dir), "-j", jobs, *map(str, targets)]
        # ninja holds the lock as well: it may outlive a process that is killed.
        if subprocess.run(command, pass_fds=[lock.fileno()]).returncode != 0:
            raise BuildError("compiling mok failed: the compiler's messages are above.")
