"""Writes docs/api.md from the docstrings: python tools/api_reference.py [--check]

Reads sources only and imports nothing of mok. `--check` writes nothing and exits with 1 if the file
is not what the docstrings say.
"""

import ast
import contextlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs/api.md"

# Modules with a public interface of their own, behind the names of `mok` itself: the files that may
# hold it, and its names (None: the module's `__all__`).
MODULES = {
    "mok.router": (
        (
            *("router/__init__.py", "router/_base.py", "router/_choice.py"),
            *("router/_kinds.py", "router/_losses.py", "router/_replay.py"),
        ),
        None,
    ),
    "mok.functional": (
        ("functional.py", "_schedule.py"),
        (
            *("MoKConfig", "FunctionalWorkspace", "ForwardContext", "BuiltSchedule"),
            *("create_workspace", "get_workspace", "clear_workspace_cache", "build_schedule"),
            *("forward", "recompute_forward_context", "backward"),
        ),
    ),
    "mok.convert": (
        ("convert.py",),
        ("from_transformers", "to_transformers", "gather_experts", "slice_experts"),
    ),
    "mok.workspace": (
        ("workspace.py", "_workspace.py", "_devices.py"),
        (
            *("Workspace", "declare", "declare_new", "ensure", "get", "is_open", "all_open"),
            *("abort", "close", "describe_device"),
        ),
    ),
    "mok.reference": (("reference.py", "_contract.py"), None),
    "mok.errors": (
        ("errors.py",),
        (
            *("SymmetricHeapError", "PeersNotLocalError", "PeerTimeoutError", "PeerAbortedError"),
            "WorkspaceClosedError",
        ),
    ),
}
HEAD = """# API reference

Written by `tools/api_reference.py` from the docstrings; `tests/cpu/test_api_reference.py` holds it
to them. [training.md](training.md), [routers.md](routers.md), [checkpoints.md](checkpoints.md),
[functional.md](functional.md) and [backends.md](backends.md) say how the parts belong together.

Shapes: T tokens of a rank, K experts per token, E experts in all R ranks, H hidden, I intermediate,
J the shared expert's width.
"""
OPS = """## torch.ops.mok

What `mok.moe` is made of, for a graph or a framework of your own; `import mok` registers them. They
have fakes, and `moe_forward` is differentiable. They run on the `cpu` and `megakernel` backends
only. All ranks of the workspace's group make the same calls in the same order. Arguments mean what
they mean in `mok.moe`, but:

- `topk_ids` and `topk_weights` are contiguous, `topk_weights` and `shared_weight` FP32;
  `num_experts` is E, of all ranks; biases and the shared expert's four tensors may be None.
- `workspace` is a name that `mok.workspace.declare` returned, `max_tokens` what it was declared
  with, or with one rank any number not below T.
- `ring_rows` is a multiple of 128. `save` is "all", "gate_up" or "none".
- `gradients` says what backward is to compute: bit i asks for `mok.shapes.GRADIENT_ORDER[i]`; 0 in
  inference. Autograd through `moe_forward` sets it for backward by what needs a gradient.

| bit | gradient of |
|---|---|
{bits}
"""
RESULTS = {
    "moe_forward": """
        out [T, H], then what backward needs: x_rows, gate, up, shared_gate, shared_up. All in x's
        dtype; their shapes follow from sizes and settings, never from the routing, and what `save`
        does not keep has 0 rows.
        """,
    "moe_recompute": """
        x_rows, gate, up, shared_gate, shared_up: the same bits as `moe_forward`'s for equal
        arguments, without out. Not differentiable.
        """,
    "moe_backward": """
        One tensor for each of `mok.shapes.GRADIENT_ORDER`, of the shape and dtype of what it is the
        gradient of; without elements where `gradients` does not ask for it. `saved` holds the last
        five results of `moe_forward`, or those of `moe_recompute`, for the same `save`. Not
        differentiable.
        """,
    "router_top_k": """
        Ids [T, K], int64, of the K largest of scores + bias: `mok.router.top_k_lowest_first`, which
        calls it on the GPUs that it is built for, says more. scores [T, E] and bias [E] or None
        are FP32. Not differentiable.
        """,
}


def tree_of(name: str) -> ast.Module:
    return ast.parse((ROOT / "mok" / name).read_text())


def constants(tree: ast.Module) -> dict[str, object]:
    """Module-level names that are literals."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            with contextlib.suppress(ValueError):
                found[node.targets[0].id] = ast.literal_eval(node.value)
    return found


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


def schemas(file: str) -> dict[str, str]:
    """What `_library.define(...)` is given in a file, by the op's name."""
    tree = tree_of(file)
    names = constants(tree)
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "_library.define":
            parts = getattr(node.args[0], "values", [node.args[0]])
            schema = "".join(
                str(names[part.value.id] if isinstance(part, ast.FormattedValue) else part.value)
                for part in parts
            )
            found[schema.partition("(")[0]] = schema
    return found


def ops() -> Iterator[str]:
    order = constants(tree_of("shapes.py"))["GRADIENT_ORDER"]
    yield OPS.format(bits="\n".join(f"| {bit} | `{name}` |" for bit, name in enumerate(order)))
    all_schemas = schemas("_library.py") | schemas("router/_choice.py")
    for name, results in RESULTS.items():
        yield f"### torch.ops.mok.{name}\n"
        lines = textwrap.fill(
            all_schemas[name], 98, subsequent_indent="    ", break_on_hyphens=False
        )
        yield block(f"{lines}\n\n{textwrap.dedent(results).strip()}")


def reference() -> str:
    parts = [HEAD, "## mok\n"]
    exports = constants(tree_of("__init__.py"))["_EXPORTS"]
    for name, module in sorted(exports.items(), key=lambda item: item[0].lower()):
        node = definitions(tree_of(f"{module}.py")).get(name)
        if node is not None and module != "errors":
            parts += described("mok", name, node)
    for module, (files, names) in MODULES.items():
        parts.append(f"## {module}\n")
        tree = tree_of(files[0])
        parts.append(block(ast.get_docstring(tree)))
        found = {}
        for file in files:
            found |= definitions(tree_of(file))
        for name in names or constants(tree)["__all__"]:
            parts += described(module, name, found[name])
    parts += ops()
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
