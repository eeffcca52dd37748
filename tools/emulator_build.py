"""How the emulator is compiled: one pybind11 module, by g++ alone and without a CUDA header.

    build/emulator/_emulator.<abi>.so   csrc/emu, csrc/ptx/host and the kernels over them

tests/emu builds it on demand; it is no part of mok's package.
"""

import os
import shlex
import sysconfig
from pathlib import Path

from tools.native_build import (
    EMULATOR_FOLDERS,
    Config,
    NinjaFile,
    cxx_flags,
    run_ninja,
    source_archs,
    standard_library_flags,
)

# What it shares with the core library, and the CUDA sources that call CUDA instead of a kernel.
SHARED_SOURCES = ("layout/*.cpp", "schedule/host_schedule.cpp", "launch/tensor_map.cpp")
CUDA_API_SOURCES = ("launch.cu", "tensor_map.cu")


def sources(root: Path) -> tuple[list[Path], list[Path]]:
    """The emulator's C++, and the CUDA sources that it compiles as C++ over csrc/ptx/host.

    Those are all of csrc/launch but the ones that call CUDA or hold kernels for chips that are not
    emulated: a kernel's launch code is the same source on the device and in the emulator.
    """
    csrc = root / "csrc"
    cpp = [
        path
        for folder in EMULATOR_FOLDERS
        for pattern in ("*.cpp", "*.S")
        for path in (csrc / folder).rglob(pattern)
    ]
    cpp += [path for pattern in SHARED_SOURCES for path in csrc.glob(pattern)]
    cpp += (csrc / "bindings" / "emulator").glob("*.cpp")
    cuda = [
        path
        for path in (csrc / "launch").glob("*.cu")
        if path.name not in CUDA_API_SOURCES and source_archs(path, ("90a",))
    ]
    return sorted(cpp), sorted(cuda)


def ninja_file(config: Config) -> str:
    """The emulator's build: one pybind11 module, by g++ alone and without a CUDA header."""
    assert config.torch_home is not None
    ninja = NinjaFile()
    cxx = shlex.quote(config.cxx).replace("$", "$$")
    ninja.rule("cxx", f"{cxx} -MD -MF $out.d $flags -c $in -o $out", depfile=True)
    ninja.rule("link", f"{cxx} -shared -o $out $in $flags")
    # Hidden: the process may hold the core library too, whose functions have the same names.
    common = ["-O2", "-DMOK_EMULATOR", "-fvisibility=hidden", "-fno-strict-aliasing"]
    common += ["-Wno-unknown-pragmas", f"-I{config.root}"]
    # A kernel's local holds a wrong number until it is written, as a register may.
    kernels = ["-ftrivial-auto-var-init=pattern"]
    planted = config.root / "csrc" / "launch" / "emulator"
    python = [config.torch_home / "include", sysconfig.get_paths()["include"]]
    bindings = config.root / "csrc" / "bindings"
    cpp, cuda = sources(config.root)
    objects = []
    for source in [*cpp, *cuda]:
        flags = [*cxx_flags(), *common]
        if source.suffix == ".cu":
            flags += ["-x", "c++", *kernels]
        elif planted in source.parents:
            flags += kernels
        elif bindings in source.parents:
            # pybind11's templates are much of the build's time, and nothing in them is hot.
            flags += ["-O1", *(f"-isystem{folder}" for folder in python)]
        objects.append(ninja.build(config.object_file(source), "cxx", [source], flags))
    link_flags = ["-pthread", *shlex.split(os.environ.get("LDFLAGS", ""))]
    link_flags += standard_library_flags(config.cxx)
    ninja.build(module_file(config), "link", objects, link_flags)
    return ninja.text()


def make_config(root: Path, torch_home: Path) -> Config:
    """pybind11's headers are torch's; nothing else of torch is used."""
    return Config(root, root / "build" / "emulator", torch_home, cuda=None)


def module_file(config: Config) -> Path:
    return config.build_dir / f"_emulator{sysconfig.get_config_var('EXT_SUFFIX')}"


def build(config: Config) -> Path:
    """Brings the module up to date and returns its file. Raises native_build.BuildError."""
    run_ninja(config, ninja_file, ())
    return module_file(config)
