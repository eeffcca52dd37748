"""The `mok` command: `mok doctor` and `mok memory`, also as `python -m mok`."""

import argparse
import dataclasses
import json
import sys


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="mok", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    doctor = commands.add_parser(
        "doctor", help="what mok finds on this machine, what a run would take, and what to mend"
    )
    doctor.add_argument("--json", action="store_true", help="for programs to read")
    doctor.set_defaults(run=_doctor)

    memory = commands.add_parser("memory", help="what a layer allocates for given sizes, per rank")
    for name, text in (
        ("max-tokens", "tokens of a rank in one call, at most"),
        ("hidden-size", "H"),
        ("intermediate-size", "I"),
        ("num-experts", "E in all ranks"),
        ("top-k", "experts per token"),
    ):
        memory.add_argument(f"--{name}", type=int, required=True, help=text)
    memory.add_argument("--num-ranks", type=int, default=1, help="expert-parallel ranks")
    memory.add_argument("--shared-intermediate-size", type=int, help="of a shared expert")
    memory.add_argument("--bias", action="store_true", help="experts have biases")
    memory.add_argument("--save", default="gate_up", help='"all", "gate_up" or "none"')
    memory.add_argument("--ring-rows", type=int, help="default: 1.25 T K and one pad per expert")
    memory.add_argument("--dtype", default="bfloat16", help="of the calls")
    memory.add_argument("--parameter-dtype", help="of the parameters; default: that of the calls")
    memory.add_argument("--threads", type=int, help="of the CPU backend")
    memory.add_argument("--device", default="cpu", help='whose workspace: "cpu" or "cuda"')
    memory.add_argument(
        "--multiprocessors", type=int, default=132, help="of the GPU (132: H100 SXM, H200)"
    )
    memory.add_argument("--json", action="store_true", help="for programs to read")
    memory.set_defaults(run=_memory)

    options = vars(parser.parse_args(arguments))
    options.pop("command")
    return options.pop("run")(**options)


def _doctor(json: bool) -> int:
    from mok import doctor

    findings = doctor.examine()
    _print([dataclasses.asdict(f) for f in findings] if json else doctor.report(findings))
    return doctor.exit_code(findings)


def _memory(json: bool, dtype: str, parameter_dtype: str | None, **sizes) -> int:
    import torch

    import mok

    dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32, None: None}
    try:
        for name in (dtype, parameter_dtype):
            if name not in dtypes:
                raise ValueError(f"dtype is {name!r}: it must be 'bfloat16' or 'float32'")
        sizes |= {"dtype": dtypes[dtype], "parameter_dtype": dtypes[parameter_dtype]}
        estimate = mok.memory_estimate(**sizes)
    except (ImportError, ValueError) as error:
        print(f"mok memory: {error}", file=sys.stderr)
        return 2
    _print(dataclasses.asdict(estimate) if json else str(estimate))
    return 0


def _print(what: object) -> None:
    print(what if isinstance(what, str) else json.dumps(what, indent=2))


if __name__ == "__main__":
    sys.exit(main())
