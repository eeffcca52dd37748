"""csrc/ptx/device and csrc/ptx/host: the same wrappers with the same parameters."""

import re
from pathlib import Path

import pytest

from tests.emu._emulator import ROOT

DEVICE, HOST = ROOT / "csrc/ptx/device", ROOT / "csrc/ptx/host"
NAMES = sorted(path.stem for path in DEVICE.glob("*.cuh"))
SITE = "Site site = Site::current()"  # what every host wrapper may have besides
NO_WRAPPERS = {"bool give_up", "bool is_time_up"}  # steps of the device's waits


def balanced(text: str, begin: int) -> str:
    """What stands between the parenthesis at `begin` and the one that closes it."""
    depth = 0
    for end in range(begin, len(text)):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        if depth == 0:
            return text[begin + 1 : end]
    raise AssertionError(f"no closing parenthesis: {text[begin : begin + 80]}")


def parameter_type(parameter: str) -> str:
    """Without the parameter's name: `uint32_t (&d)[4]` is `uint32_t (&)[4]`."""
    parameter = re.sub(r"\(&\w+\)", "(&)", parameter)
    if parameter.endswith(("*", "&", "]")):
        return parameter
    return re.sub(r"(?<=[\w*&>])\s+\w+$", "", parameter).replace(" *", "*").replace(" &", "&")


def wrappers(path: Path) -> set[tuple[str, tuple[str, ...]]]:
    """(result and name, types of the parameters) of each MOK_DEVICE function.

    Scopes and widths are one entry, whether written out or by a macro.
    """
    text = re.sub(r"#define (MOK_DEVICE|__\w+).*", "", path.read_text())
    text = re.sub(r"//[^\n]*|/\*.*?\*/|\\\n", " ", text, flags=re.DOTALL)
    text = re.sub(r"\s+", " ", text)
    found = set()
    for match in re.finditer(r"\bMOK_DEVICE (?:explicit )?([^()=;{}]*?[\w#]+) ?\(", text):
        parameters = balanced(text, match.end() - 1).replace(SITE, "")
        types = [parameter_type(each.strip()) for each in parameters.split(",") if each.strip()]
        name = re.sub(r"_(gpu|sys)\b", "_##SCOPE", match[1])
        if name.endswith("##SCOPE"):
            types = [re.sub(r"\buint(32|64)_t\b", "T", each) for each in types]
        if name not in NO_WRAPPERS:
            found.add((name, tuple(types)))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_both_sides_have_the_same_wrappers(name):
    device, host = wrappers(DEVICE / f"{name}.cuh"), wrappers(HOST / f"{name}.h")
    assert device == host


def test_the_parser_sees_what_there_is(tmp_path):
    path = tmp_path / "x.h"
    path.write_text(
        "MOK_DEVICE void store(uint32_t address,  // where\n"
        "                      const uint32_t (&words)[4], Site site = Site::current()) {}\n"
        "template <typename T> MOK_DEVICE T load(const T* from, uint64_t) { return *from; }\n"
    )
    assert wrappers(path) == {
        ("void store", ("uint32_t", "const uint32_t (&)[4]")),
        ("T load", ("const T*", "uint64_t")),
    }
    found = wrappers(DEVICE / "mbarrier.cuh")
    assert ("bool mbar_wait", ("uint32_t", "uint32_t", "Deadline&")) in found
    assert len(set.union(*(wrappers(DEVICE / f"{name}.cuh") for name in NAMES))) > 80
