"""`mok.memory_estimate` against what is really allocated."""

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
