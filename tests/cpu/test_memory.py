"""`mok.memory_estimate` against what is really allocated."""

import re
from pathlib import Path

import pytest
import torch

import mok
from mok import memory, workspace
from mok.shapes import context_shapes
from tests._harness import run_ranks_fresh
from tests._numerics import make_case
from tests._ops import op_arguments

E, K = 6, 2
GROWING = ("packed operands", "plan")  # a bound, and memory that is not the workspace's


def counted_by_workspace(estimate):
    return sum(
        item.bytes
        for item in estimate.items
        if item.scope == "workspace" and not item.name.startswith(GROWING)
    )


def measure_job(rank, group, sizes, tokens, settings):
    """What the workspace holds after a step, its packed operands left out, and the estimate."""
    torch.set_num_threads(1)
    group = group if group.size() > 1 else None
    H, I, num_experts, top_k = sizes
    layer = mok.MoELayer(
        *(H, I, num_experts, top_k),
        group=group,
        max_tokens=tokens,
        dtype=torch.bfloat16,
        **settings,
    )
    x = torch.randn(tokens, H).bfloat16().requires_grad_()
    layer(x).sum().backward()
    (opened,) = workspace.all_open()
    return opened.memory_bytes, memory.memory_estimate(layer, max_tokens=tokens, threads=1)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("sizes", "tokens", "settings"),
    [
        ((512, 256, 8, 4), 2048, {}),
        ((512, 256, 8, 2), 2048, {"shared_intermediate_size": 320, "bias": True}),
        ((256, 512, 4, 4), 3000, {"ring_rows": 1024, "save": "none"}),
    ],
)
def test_the_workspace_is_as_large_as_estimated(num_ranks, sizes, tokens, settings):
    for held, estimate in run_ranks_fresh(num_ranks, measure_job, sizes, tokens, settings):
        exact = counted_by_workspace(estimate)
        workers = next(i.bytes for i in estimate.items if i.name.startswith("packed"))
        # Buffers are rounded up to cache lines, 16 of them at most.
        assert exact <= held <= exact + workers + 16 * 64
        assert held >= 0.75 * (exact + workers)


@pytest.mark.parametrize("extras", [{}, {"shared": 24}, {"bias": True, "shared": 8}])
@pytest.mark.parametrize("save", ["all", "gate_up", "none"])
def test_the_saved_context_is_that_of_the_op(save, extras):
    tokens, H, I = 300, 16, 24
    case = make_case(tokens, K, E, H, I, **extras)
    for ring_rows in (256, 4096):
        tensors, settings = op_arguments(case, save=save, ring_rows=ring_rows)
        shapes = context_shapes(tensors, settings)
        expected = sum(rows * columns for rows, columns in shapes) * 2
        estimate = memory.memory_estimate(
            max_tokens=tokens,
            hidden_size=H,
            intermediate_size=I,
            num_experts=E,
            top_k=K,
            shared_intermediate_size=extras.get("shared"),
            save=save,
            ring_rows=ring_rows,
        )
        assert estimate.saved_by_policy[save] == expected
        (item,) = [i for i in estimate.items if i.name == "saved context"]
        assert item.bytes == expected


DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "memory.md"


def documented_elements(save: str, **sizes: int) -> int:
    """The middle cell of the policy's row in docs/memory.md, computed."""
    (row,) = re.findall(rf'^\| `"{save}"`.*', DOCUMENT.read_text(), re.M)
    terms = row.split("|")[2].split(":")[-1].strip().replace(" x ", " * ")
    if terms == "nothing":
        return 0
    assert re.fullmatch(r"[\w+*() ]+", terms)
    return eval(re.sub(r"2 ([IJ])", r"2 * \1", terms), {}, sizes)


@pytest.mark.parametrize("shared", [0, 40])
@pytest.mark.parametrize("save", ["all", "gate_up", "none"])
def test_the_saved_context_is_as_documented(save, shared):
    """What a forward really returns for backward, against the formula that users read."""
    tokens, H, I, ring_rows = 300, 16, 24, 256
    case = make_case(tokens, K, E, H, I, shared=shared or None)
    tensors, settings = op_arguments(case, save=save, ring_rows=ring_rows)
    context = torch.ops.mok.moe_forward(*tensors.in_order(), *settings)[1:]
    assert sum(tensor.numel() for tensor in context) == documented_elements(
        save, rows=ring_rows, T=tokens, H=H, I=I, J=shared
    )


needs_kernels = pytest.mark.skipif(
    not hasattr(mok._C, "device_memory"), reason="mok was built without CUDA kernels"
)


def gpu_estimate(**sizes):
    return mok.memory_estimate(**sizes, device="cuda")


def sizes_by_name(estimate) -> dict[str, int]:
    return {item.name: item.bytes for item in estimate.items if item.scope == "workspace"}


@needs_kernels
@pytest.mark.parametrize("save", ["all", "none"])
@pytest.mark.parametrize("ring_rows", [1024, None])
def test_a_gpus_temporaries_are_those_of_backward(ring_rows, save):
    """The arrays of a backward pass, listed by hand."""
    T, H, I, J = 512, 256, 192, 64
    sizes = {
        "max_tokens": T,
        "hidden_size": H,
        "intermediate_size": I,
        "num_experts": 8,
        "top_k": 4,
    }
    settings = {"shared_intermediate_size": J, "save": save, "bias": True, "ring_rows": ring_rows}
    estimate = gpu_estimate(**sizes, **settings)
    rows, more_chunks = estimate.ring_rows, estimate.ring_rows < estimate.worst_case_rows
    makes_gate_up = save == "none" or more_chunks
    bf16 = [rows * H] * 2 + [rows * I] * (3 + 2 * makes_gate_up)  # x, dout; dg, du, h', g, u
    bf16 += [T * J] * (3 + 2 * (save == "none")) + [T * H]
    fp32 = [rows * (I // 64), rows, T * (J // 64)]
    if rows < T * 4:  # the longest segment does not fit
        fp32.append(3 * H * I + 2 * I + H)
    expected = sum(-(-count * 2 // 256) * 256 for count in bf16)
    expected += sum(-(-count * 4 // 256) * 256 for count in fp32)
    held = sizes_by_name(estimate)
    assert held["ring and other temporaries of backward"] == expected
    assert held["returning rows [T * K, H]"] == T * 4 * H * 2
    temporaries = expected + T * 4 * H * 2 + held["plan, task tables and counters"]
    assert (temporaries + held["rounding of temporaries to 2 MiB"]) % 2**21 == 0


@needs_kernels
def test_a_gpus_window_has_what_peers_exchange():
    T, K, H = 1000, 4, 264
    sizes = {"max_tokens": T, "hidden_size": H, "intermediate_size": 64, "num_experts": 8}
    held = sizes_by_name(gpu_estimate(**sizes, top_k=K, num_ranks=4))
    align = 256
    inputs = 2 * -(-T * H * 2 // align) * align + 2 * -(-T * K * 4 // align) * align
    assert held["x, dout, ids and weights for the peers"] == inputs
    assert held["returning rows [T * K, H]"] == -(-T * K * H * 2 // align) * align
    window = sum(list(held.values())[:3])
    assert window % 2**21 == 0
    assert window - 2**21 < inputs + T * K * H * 2 + T * K * 4 + 2**16


@needs_kernels
def test_a_gpus_plan_depends_on_ranks_and_multiprocessors():
    sizes = {"max_tokens": 2048, "hidden_size": 64, "intermediate_size": 64, "num_experts": 64}
    name = "plan, task tables and counters"
    by_ranks = [
        sizes_by_name(gpu_estimate(**sizes, top_k=4, num_ranks=r))[name] for r in (1, 4, 16)
    ]
    assert by_ranks == sorted(set(by_ranks))
    few = sizes_by_name(gpu_estimate(**sizes, top_k=4, num_ranks=4, multiprocessors=8))[name]
    assert 0 < abs(few - by_ranks[1]) < by_ranks[1] / 10


@needs_kernels
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 33, "num_experts": 64}, "top_k = 33: on a GPU it must be at most 32"),
        ({"dtype": torch.float32}, "with device='cuda' it must be torch.bfloat16"),
        ({"device": "xpu"}, "device is 'xpu': it must be 'cpu' or 'cuda'"),
        ({"multiprocessors": 0}, "multiprocessors is 0"),
    ],
)
def test_what_a_gpu_does_not_take_is_named(change, message):
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_experts": 8, "top_k": 2}
    with pytest.raises(ValueError, match=message):
        mok.memory_estimate(**{"max_tokens": 100, "device": "cuda", **sizes} | change)


def test_a_build_without_kernels_says_so(monkeypatch):
    monkeypatch.delattr(mok._C, "device_memory", raising=False)
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_experts": 8, "top_k": 2}
    with pytest.raises(ValueError, match="this mok was built without CUDA kernels"):
        gpu_estimate(max_tokens=100, **sizes)


def test_weights_and_gradients_are_the_parameters():
    settings = {"shared_intermediate_size": 16, "bias": True}
    layer = mok.MoELayer(32, 48, E, K, **settings, dtype=torch.float32)
    estimate = mok.memory_estimate(layer, max_tokens=10)
    expected = sum(p.numel() * p.element_size() for p in layer.parameters())
    assert estimate.total("layer") == 2 * expected


def test_a_meta_layer_of_72_ranks_is_enough():
    """Nothing is allocated: 671B-like sizes on a laptop."""
    estimate = mok.memory_estimate(
        max_tokens=8192,
        hidden_size=7168,
        intermediate_size=2048,
        num_experts=288,
        top_k=8,
        num_ranks=72,
    )
    worst = 72 * 8192 * 8
    assert estimate.worst_case_rows >= worst
    assert estimate.ring_rows < worst / 40
    returning = next(i for i in estimate.items if i.name.startswith("returning rows"))
    assert returning.bytes == 8192 * 8 * 7168 * 2
    layer = mok.MoELayer(7168, 2048, 256, 8, device="meta", dtype=torch.bfloat16)
    assert mok.memory_estimate(layer, max_tokens=4096).total("layer") > 2**34


def test_the_table_lists_everything():
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_experts": 8, "top_k": 2}
    estimate = mok.memory_estimate(max_tokens=100, **sizes)
    text = str(estimate)
    for item in estimate.items:
        assert item.name in text
    for policy in ("all", "gate_up", "none"):
        assert f"save={policy!r}" in text
    assert f"ring: {estimate.ring_rows} rows" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": None}, "top_k is None: it must be a positive integer"),
        ({"num_experts": 9}, "num_experts is 9: it must be a multiple of 2 ranks"),
        ({"save": "x"}, "save is 'x'"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"ring_rows": -5}, "ring_rows is -5: it must be None or a positive integer"),
        ({"threads": 0}, "threads is 0: it must be None or a positive integer"),
        ({"shared_intermediate_size": -64}, "shared_intermediate_size is -64"),
        ({"shared_intermediate_size": 12}, "shared_intermediate_size is 12: .* multiple of 8"),
        ({"hidden_size": 12}, "hidden_size is 12: it must be a multiple of 8"),
        ({"intermediate_size": 7}, "intermediate_size is 7: it must be a multiple of 8"),
        ({"top_k": 9}, r"top_k is 9: it must be at most the number of experts \(8\)"),
    ],
)
def test_wrong_sizes_are_named(change, message):
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_experts": 8, "top_k": 2}
    with pytest.raises(ValueError, match=message):
        mok.memory_estimate(**{"max_tokens": 100, "num_ranks": 2, **sizes} | change)
