"""Writes docs/api.md from the docstrings: python tools/api_reference.py [--check]

Reads sources only and imports nothing of mok. `--check` writes nothing and exits with 1 if the file
is not what the docstrings say.
"""

import ast
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs/api.md"

# Modules with a public interface of their own, behind the names of `mok` itself.
MODULES = {
    "mok.router": (
        *("router/_base.py", "router/_choice.py", "router/_kinds.py"),
        *("router/_losses.py", "router/_replay.py"),
    ),
    "mok.functional": ("functional.py", "_schedule.py"),
    "mok.convert": ("convert.py",),
    "mok.workspace": ("workspace.py", "_workspace.py", "_devices.py"),
    "mok.reference": ("reference.py", "_contract.py"),
    "mok.errors": ("errors.py",),
}
HEAD = """# API reference

Written by `tools/api_reference.py` from the docstrings; `tests/cpu/test_api_reference.py` holds it
to them. [training.md](training.md), [routers.md](routers.md), [checkpoints.md](checkpoints.md),
[functional.md](functional.md) and [backends.md](backends.md) say how the parts belong together.

Shapes: T tokens of a rank, K experts per token, E experts in all R ranks, H hidden, I intermediate,
J the shared expert's width.
"""


def tree_of(name: str) -> ast.Module:
    return ast.parse((ROOT / "mok" / name).read_text())


def exports() -> dict[str, str]:
    """The names of `mok` and the modules they come from."""
    for node in tree_of("__init__.py").body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "_EXPORTS":
            return ast.literal_eval(node.value)
    raise LookupError("mok/__init__.py has no _EXPORTS")


def definitions(tree: ast.Module) -> dict[str, ast.AST]:
    """Public functions and classes that have a docstring, in the order of the source."""
    return {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and ast.get_docstring(node)
    }


def signature(node: ast.FunctionDef) -> str:
    arguments = node.args
    if arguments.args and arguments.args[0].arg in ("self", "cls"):
        arguments.args = arguments.args[1:]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(arguments)}){returns}"


def block(text: str) -> str:
    return f"```text\n{text}\n```\n"


def wrapped(name: str, node: ast.FunctionDef) -> str:
    text = f"{name}{signature(node)}"
    return textwrap.fill(text, 98, subsequent_indent="    ", break_on_hyphens=False)


def described(prefix: str, name: str, node: ast.AST) -> Iterator[str]:
    yield f"### {prefix}.{name}\n"
    document = ast.get_docstring(node)
    if isinstance(node, ast.FunctionDef):
        yield block(f"{wrapped(name, node)}\n\n{document}")
        return
    methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
    constructor = next((method for method in methods if method.name == "__init__"), None)
    parts = [document]
    if constructor is not None:
        parts.insert(0, wrapped(name, constructor))
    for method in methods:
        text = ast.get_docstring(method)
        if text and not method.name.startswith("_"):
            is_property = any(getattr(d, "id", "") == "property" for d in method.decorator_list)
            head = f".{method.name}" if is_property else wrapped(f".{method.name}", method)
            parts.append(f"{head}\n{textwrap.indent(text, '    ')}")
    yield block("\n\n".join(parts))


def reference() -> str:
    parts = [HEAD, "## mok\n"]
    for name, module in sorted(exports().items(), key=lambda item: item[0].lower()):
        node = definitions(tree_of(f"{module}.py")).get(name)
        if node is not None and module != "errors":
            parts += described("mok", name, node)
    for module, files in MODULES.items():
        parts.append(f"## {module}\n")
        document = ast.get_docstring(tree_of(files[0]))
        if files[0].startswith("router/"):
            document = ast.get_docstring(tree_of("router/__init__.py"))
        parts.append(block(document))
        for file in files:
            for name, node in definitions(tree_of(file)).items():
                parts += described(module, name, node)
    return "\n".join(parts)


def main() -> int:
    text = reference()
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(text)
        return 0
    if TARGET.exists() and TARGET.read_text() == text:
        return 0
    print("docs/api.md is not what the docstrings say: run python tools/api_reference.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
