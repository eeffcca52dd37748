"""tools/native_build.py: which compiler sees which source, and what is said when one is missing."""

import ctypes
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from tools import emulator_build, native_build
from tools.native_build import BuildError, Config, Cuda

TOOLKIT, TOOLKIT_REASON = native_build.find_toolkit(os.environ)
needs_nvcc = pytest.mark.skipif(TOOLKIT is None, reason=TOOLKIT_REASON)

KERNEL = """
#include "csrc/layout/value.h"
__global__ void {name}_kernel(float* x) {{ x[threadIdx.x] *= VALUE; }}
extern "C" int {name}_arch() {{
#ifdef MOK_WITH_{family}
    return VALUE;
#else
    return -1;
#endif
}}
extern "C" void {name}_launch(float* x) {{ {name}_kernel<<<1, 32>>>(x); }}
"""


@pytest.fixture
def project(tmp_path) -> Path:
    """A source tree with one header and two C++ files, in a folder that has a space."""
    root = tmp_path / "a project"
    layout = root / "csrc" / "layout"
    layout.mkdir(parents=True)
    (layout / "value.h").write_text("#pragma once\n#define VALUE 3\n")
    (layout / "value.cpp").write_text(
        '#include "csrc/layout/value.h"\nextern "C" int value() { return VALUE; }\n'
    )
    (layout / "other.cpp").write_text('extern "C" int other() { return 1; }\n')
    return root


def core_only(root: Path, cuda: Cuda | None = None) -> Config:
    return Config(root=root, build_dir=root / "build dir", torch_home=None, cuda=cuda)


def fake_nvcc(home: Path, output: str) -> Path:
    nvcc = home / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho '{output}'\n")
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    return home


def test_only_what_changed_is_compiled(project, capfd):
    config = core_only(project)
    native_build.build(config)
    library = config.libraries["libmok_core.so"]
    assert ctypes.CDLL(str(library)).value() == 3
    capfd.readouterr()
    native_build.build(config)
    assert "no work to do" in capfd.readouterr().out
    (project / "csrc/layout/value.h").write_text("#pragma once\n#define VALUE 4\n")
    native_build.build(config)
    output = capfd.readouterr().out
    assert "value.cpp.o" in output
    assert "other.cpp.o" not in output
    # A copy: the dynamic linker knows the first library by its path.
    copy = shutil.copy(library, project / "copy.so")
    assert ctypes.CDLL(str(copy)).value() == 4


def test_a_new_source_joins_and_a_deleted_one_leaves(project):
    config = core_only(project)
    (project / "csrc" / "bindings").mkdir()
    (project / "csrc" / "bindings" / "not_core.cpp").write_text("#error not part of the core\n")
    (project / "csrc" / "layout" / "other.cpp").unlink()
    (project / "csrc" / "cpu").mkdir()
    (project / "csrc" / "cpu" / "new.cpp").write_text('extern "C" int fresh() { return 7; }\n')
    native_build.build(config)
    library = ctypes.CDLL(str(config.libraries["libmok_core.so"]))
    assert library.fresh() == 7
    assert not hasattr(library, "other")


def test_the_core_and_the_emulator_share_only_what_both_need(project):
    csrc = project / "csrc"
    for name in (
        *("emu/machine.cpp", "emu/switch.S", "ptx/host/x.cpp", "launch/emulator/launch.cpp"),
        *("cpu/executor.cpp", "cpu/emulator/sigmoid.cpp", "bindings/emulator/module.cpp"),
        *("launch/launch.cu", "launch/plan.cu", "launch/sm90_x.cu", "launch/sm100_x.cu"),
    ):
        (csrc / name).parent.mkdir(parents=True, exist_ok=True)
        (csrc / name).touch()

    def names(paths: list[Path]) -> set[str]:
        return {str(path.relative_to(csrc)) for path in paths}

    both = {"layout/value.cpp", "layout/other.cpp"}
    core, core_cuda = native_build.core_sources(project)
    assert names(core) == {*both, "cpu/executor.cpp"}
    kernels = {"launch/plan.cu", "launch/sm90_x.cu"}
    assert names(core_cuda) == {*kernels, "launch/launch.cu", "launch/sm100_x.cu"}
    emulator, emulator_cuda = emulator_build.sources(project)
    assert names(emulator) == {
        *both,
        *("emu/machine.cpp", "emu/switch.S", "ptx/host/x.cpp", "launch/emulator/launch.cpp"),
        *("cpu/emulator/sigmoid.cpp", "bindings/emulator/module.cpp"),
    }
    assert names(emulator_cuda) == kernels


def test_an_undefined_symbol_fails_the_build(project, capfd):
    (project / "csrc" / "layout" / "other.cpp").write_text(
        "void missing();\nvoid f() { missing(); }\n"
    )
    with pytest.raises(BuildError, match=r"compiling mok failed: .* above"):
        native_build.build(core_only(project))
    assert "missing()" in capfd.readouterr().out


def test_a_missing_compiler_is_named(project):
    config = Config(project, project / "build", None, None, cxx="no-such-compiler")
    with pytest.raises(BuildError, match=r"'no-such-compiler' was not found: install g\+\+ 12"):
        native_build.build(config)


@needs_nvcc
def test_each_cuda_source_is_built_for_its_own_chips(project):
    launch = project / "csrc" / "launch"
    launch.mkdir()
    for name, family in [("sm90_tiny", "SM90"), ("sm100_tiny", "SM100"), ("any", "CUDA")]:
        (launch / f"{name}.cu").write_text(KERNEL.format(name=name, family=family))
    cuda = Cuda(TOOLKIT.home, TOOLKIT.version, ("90a", "100f"))
    config = core_only(project, cuda)
    native_build.build(config)
    library = ctypes.CDLL(str(config.libraries["libmok_core.so"]))
    assert [getattr(library, f"{n}_arch")() for n in ("sm90_tiny", "sm100_tiny", "any")] == [3] * 3

    def machine_code(source: str) -> list[str]:
        # The assembler's options are kept beside the code that they made.
        content = config.object_file(launch / source).read_bytes()
        return sorted(arch.decode() for arch in re.findall(rb"-arch (sm_\w+) ", content))

    assert machine_code("sm90_tiny.cu") == ["sm_90a"]
    assert machine_code("sm100_tiny.cu") == ["sm_100f"]
    assert machine_code("any.cu") == ["sm_100f", "sm_90a"]


@needs_nvcc
def test_a_source_for_other_chips_is_left_out(project):
    launch = project / "csrc" / "launch"
    launch.mkdir()
    (launch / "sm100_tiny.cu").write_text("#error not for this build\n")
    (launch / "sm90_tiny.cu").write_text(KERNEL.format(name="sm90_tiny", family="SM100"))
    config = core_only(project, Cuda(TOOLKIT.home, TOOLKIT.version, ("90a",)))
    native_build.build(config)
    assert ctypes.CDLL(str(config.libraries["libmok_core.so"])).sm90_tiny_arch() == -1


def test_architectures_by_name():
    archs = ("90a", "100f", "103a")
    by_name = {
        "sm90_bf16_moe_forward.cu": ["90a"],
        "sm100_mxfp8_moe.cu": ["100f", "103a"],
        "plan.cu": ["90a", "100f", "103a"],
    }
    for name, expected in by_name.items():
        assert native_build.source_archs(Path(name), archs) == expected
    assert native_build.source_archs(Path("sm100_x.cu"), ("90a",)) == []
    assert native_build.gencode_flags(["90a"]) == ["-gencode=arch=compute_90a,code=sm_90a"]


@pytest.mark.parametrize("text", ["90a 100f,103a", " 90a;100f  103a 90a "])
def test_architecture_lists(text):
    assert native_build.parse_archs(text) == ("90a", "100f", "103a")


@pytest.mark.parametrize("text", ["sm_90a", "9.0", "90a hopper", "", " "])
def test_a_wrong_architecture_is_named(text):
    with pytest.raises(BuildError, match=r"MOK_CUDA_ARCHS (has '\S+'|is empty): .*90a"):
        native_build.parse_archs(text)


def test_cuda_is_found_by_toolkit_and_torch_alone(tmp_path):
    home = fake_nvcc(tmp_path / "cuda", "Cuda compilation tools, release 13.1, V13.1.2")
    for env in ({"CUDA_HOME": str(home)}, {"PATH": str(home / "bin")}):
        cuda, _ = native_build.find_cuda("13.0", env)
        assert cuda == Cuda(home, "13.1", ("90a",))
    cuda, _ = native_build.find_cuda("13.0", {"CUDA_HOME": str(home), "MOK_CUDA_ARCHS": "100f"})
    assert cuda.archs == ("100f",)
    assert native_build.find_cuda("13.0", {"CUDA_HOME": str(home), "MOK_WITH_CUDA": "0"})[0] is None


@pytest.mark.parametrize(
    ("torch_cuda", "release", "reason"),
    [
        (None, "13.0", r"the installed torch is a build without CUDA"),
        ("12.8", "13.0", r"nvcc is 13\.0, torch was built with CUDA 12\.8: majors differ"),
        ("13.0", None, r"no nvcc was found \(CUDA_HOME is unset and PATH has none\)"),
        ("13.0", "none", r".*/bin/nvcc --version names no release"),
    ],
)
def test_why_there_is_no_cuda(tmp_path, torch_cuda, release, reason):
    env = {"PATH": str(tmp_path)}
    if release is not None:
        text = "hello" if release == "none" else f"release {release}, V"
        env["CUDA_HOME"] = str(fake_nvcc(tmp_path / "cuda", text))
    cuda, words = native_build.find_cuda(torch_cuda, env)
    assert cuda is None
    assert re.fullmatch(reason, words)
    with pytest.raises(BuildError, match=f"MOK_WITH_CUDA=1, but {reason}"):
        native_build.find_cuda(torch_cuda, {**env, "MOK_WITH_CUDA": "1"})


def test_a_cuda_home_without_nvcc_and_a_wrong_switch_are_named(tmp_path):
    cuda, words = native_build.find_cuda("13.0", {"CUDA_HOME": str(tmp_path)})
    assert cuda is None
    assert words == f"CUDA_HOME={tmp_path} has no bin/nvcc"
    with pytest.raises(BuildError, match=r"MOK_WITH_CUDA is 'yes': use 0 .*, 1 .* or leave it out"):
        native_build.find_cuda("13.0", {"MOK_WITH_CUDA": "yes"})


def test_a_compiler_without_the_shared_runtime_still_links_it(tmp_path, project):
    """Seen on a GPU machine: g++ with libstdc++.a alone gave the process a second C++ runtime."""
    real = shutil.which("g++")
    compiler = tmp_path / "g++-static"
    # What such a g++ does: it does not know the file, and -lstdc++ takes the archive.
    compiler.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = -print-file-name=libstdc++.so ]; then echo libstdc++.so; exit 0; fi\n'
        f'exec {real} -static-libstdc++ "$@"\n'
    )
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    (project / "csrc" / "layout" / "stream.cpp").write_text(
        "#include <sstream>\n"
        'extern "C" int length() { std::ostringstream s; s << 12; return s.str().size(); }\n'
    )
    config = Config(
        root=project, build_dir=tmp_path / "b", torch_home=None, cuda=None, cxx=str(compiler)
    )
    core = config.libraries["libmok_core.so"]
    native_build.build(config, [core])
    symbols = subprocess.run(["nm", "-DC", core], capture_output=True, text=True).stdout
    assert "U std::ios_base::ios_base()" in symbols
    assert ctypes.CDLL(str(core)).length() == 2
