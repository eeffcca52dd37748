"""`mok.functional` on one rank: upstream's call shapes, the bits of `mok.moe`, its schedule."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mok
from mok import _C, functional
from mok._schedule import fill_schedule
from mok.errors import WorkspaceClosedError
from mok.functional import MoKConfig
from mok.shapes import worst_case_rows
from tests._functional import arguments, get_workspace, step
from tests._numerics import SHARED, WEIGHTS, assert_bitwise_equal, make_case, run

T, K, E, H, I = 40, 3, 5, 16, 72
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def no_workspaces_left():
    yield
    functional.clear_workspace_cache()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("save", ["all", "gate_up", "none"])
@pytest.mark.parametrize("macrobatch_size", [131072, 200, 1])
@pytest.mark.parametrize("shared", [None, 24])
def test_gives_the_bits_of_moe(shared, macrobatch_size, save, recompute):
    case = make_case(300, K, E, H, 24, shared=shared, swiglu_limit=2.0)
    config = MoKConfig(macrobatch_size=macrobatch_size, save=save)
    assert_bitwise_equal(step(config, case, recompute=recompute), run(mok.moe, case, BF16))


@pytest.mark.parametrize("tokens", [0, 1, 31])
@pytest.mark.parametrize("activation", ["swiglu", "gpt_oss"])
def test_any_number_of_tokens_and_fp32(tokens, activation):
    case = make_case(tokens, K, E, H, I, shared=8, activation=activation)
    config = MoKConfig(activation=activation)
    expected = run(mok.moe, case, torch.float32)
    assert_bitwise_equal(step(config, case, torch.float32), expected)


class UsersFunction(torch.autograd.Function):
    """What callers of upstream write around it: positional calls and nothing of ours."""

    @staticmethod
    def forward(ctx, config, workspace, schedule, x, router_weights, *weights):
        out, context = functional.forward(
            config, workspace, schedule, x, router_weights, *weights, None
        )
        ctx.save_for_backward(x, router_weights, *weights)
        ctx.rest = (config, workspace, schedule, context)
        return out

    @staticmethod
    def backward(ctx, d_output):
        gradients = functional.backward(*ctx.rest, d_output, *ctx.saved_tensors, None)
        d_x, d_router, d_gate, d_up, d_down, d_sgate, d_sup, d_sdown = gradients
        return None, None, None, d_x, d_router, d_sgate, d_sup, d_sdown, d_gate, d_up, d_down


def upstream_config():
    return MoKConfig(
        fwd_num_comm_sms=24,
        bwd_num_comm_sms=28,
        minibatch_size=256,
        macrobatch_size=4096,
        schedule_capacity_multiplier=1.0,
        all_gather_top_experts_chunk_bytes=1024,
    )


@pytest.mark.parametrize("compiled", [None, "aot_eager"])
def test_code_for_upstream_runs(compiled):
    torch._dynamo.reset()
    case = make_case(T, K, E, H, I, shared=I, routing="uniform")
    config = upstream_config()
    workspace = get_workspace(config, case)
    leaves = [tensor.clone().requires_grad_() for tensor in arguments(case)]

    def layer(top_experts, *leaves):
        schedule = functional.build_schedule(workspace, config, top_experts, num_local_experts=E)
        return UsersFunction.apply(config, workspace, schedule, *leaves)

    if compiled:
        layer = torch.compile(layer, fullgraph=True, backend=compiled)
    out = layer(case.topk_ids_TK, *leaves)
    out.backward(case.dout_TH.to(BF16))
    names = ("x_TH", "topk_weights_TK", *SHARED, *WEIGHTS)
    results = {"d" + name: leaf.grad for name, leaf in zip(names, leaves, strict=True)}
    expected = run(mok.moe, case, BF16)
    assert_bitwise_equal({"out": out.detach()} | results, expected)


def test_nothing_is_recorded_by_autograd():
    case = make_case(T, K, E, H, I)
    config = MoKConfig()
    workspace = get_workspace(config, case)
    schedule = functional.build_schedule(workspace, config, case.topk_ids_TK, num_local_experts=E)
    args = [t if t is None else t.requires_grad_() for t in arguments(case)]
    out, context = functional.forward(config, workspace, schedule, *args)
    assert not out.requires_grad
    assert not context.x_routed.requires_grad


@pytest.mark.parametrize("save", ["all", "none"])
def test_context_has_the_named_tensors(save):
    case = make_case(T, K, E, H, I, shared=8, routing="uniform")
    config = MoKConfig(save=save)
    workspace = get_workspace(config, case)
    schedule = functional.build_schedule(workspace, config, case.topk_ids_TK, num_local_experts=E)
    _, context = functional.forward(config, workspace, schedule, *arguments(case))
    rows = int(schedule.num_tokens) if save == "all" else 0
    tokens = T if save == "all" else 0
    assert context.x_routed.shape[1] == H
    assert context.hidden_routed.shape == context.gate_routed.shape
    assert context.hidden_shared.shape == context.gate_shared.shape == (tokens, 8)
    is_route = schedule.peer_rank[:rows] >= 0
    home = schedule.peer_token_idx[:rows][is_route] // K
    expected = case.tensors["x_TH"].to(BF16)[home]
    assert torch.equal(context.x_routed[:rows][is_route], expected)
    gate, up = context.gate_routed[:rows].float(), context.up_routed[:rows].float()
    hidden = (gate * torch.sigmoid(gate) * up).to(BF16)
    assert torch.equal(context.hidden_routed[:rows][is_route], hidden[is_route])


@st.composite
def routings(draw):
    num_ranks = draw(st.integers(1, 6))
    num_experts = num_ranks * draw(st.integers(1, 9))
    shape = (num_ranks, draw(st.integers(0, 40)), draw(st.integers(1, 5)))
    seed = draw(st.integers(0, 2**32 - 1))
    highest = draw(st.sampled_from([1, num_experts, num_experts + 3]))
    ids = np.random.default_rng(seed).integers(-2, highest, shape)
    return ids, num_experts


@settings(max_examples=60, deadline=None)
@given(routings())
def test_schedule_is_the_plan(routing):
    ids, num_experts = routing
    num_ranks, tokens, top_k = ids.shape
    capacity = worst_case_rows(num_ranks, num_experts, top_k, tokens)
    for rank in range(num_ranks):
        plan = _C.build_plan(list(ids), rank, num_experts)
        sizes = (capacity, capacity, 1, num_experts // num_ranks)
        results = [torch.empty(size, dtype=torch.int32) for size in sizes]
        fill_schedule(torch.from_numpy(ids), rank, num_experts, *results)
        rows = len(plan["row_peer"])
        assert results[2].item() == rows
        for result, name in zip(results[:2], ("row_peer", "row_slot"), strict=True):
            np.testing.assert_array_equal(result[:rows].numpy(), plan[name])
            assert (result[rows:] == -1).all()
        np.testing.assert_array_equal(results[3].numpy(), plan["counts"])


def test_schedule_op_passes_opcheck():
    case = make_case(9, K, E, H, I)
    workspace = get_workspace(MoKConfig(), case)
    args = (case.topk_ids_TK, workspace.name, E, 1, 9)
    torch.library.opcheck(torch.ops.mok.build_schedule.default, args)


def test_workspaces_are_cached_by_their_sizes():
    case, config = make_case(T, K, E, H, I), MoKConfig()
    first = get_workspace(config, case)
    assert get_workspace(config, case) is first
    assert get_workspace(config, case, num_local_tokens=T + 1) is not first
    assert get_workspace(config, case, torch.float32) is not first
    assert first.workspace.max_tokens == T
    functional.clear_workspace_cache()
    with pytest.raises(WorkspaceClosedError):
        _ = first.workspace
    second = get_workspace(config, case)
    assert second.name != first.name
    second.close()
    assert get_workspace(config, case).workspace.closed is False


def test_a_closed_workspace_says_so():
    case, config = make_case(T, K, E, H, I), MoKConfig()
    workspace = get_workspace(config, case)
    schedule = functional.build_schedule(workspace, config, case.topk_ids_TK, num_local_experts=E)
    workspace.close()
    with pytest.raises(WorkspaceClosedError):
        functional.forward(config, workspace, schedule, *arguments(case))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"macrobatch_size": 0}, ValueError, "macrobatch_size is 0: it must be a positive"),
        ({"save": "x"}, ValueError, "save is 'x': it must be one of"),
        ({"activation": "relu"}, ValueError, "activation is 'relu': it must be one of"),
    ],
)
def test_wrong_settings_are_named(change, error, message):
    with pytest.raises(error, match=message):
        MoKConfig(**change)


def test_wrong_arguments_are_named():
    case, config = make_case(T, K, E, H, I), MoKConfig()
    workspace = get_workspace(config, case)
    ids = case.topk_ids_TK

    def schedule(ids, num_local_experts=E):
        return functional.build_schedule(
            workspace, config, ids, num_local_experts=num_local_experts
        )

    with pytest.raises(ValueError, match=r"top_experts has shape \(40, 2\): it must be \[T, 3\]"):
        schedule(ids[:, :2])
    with pytest.raises(ValueError, match=r"top_experts has T = 80 tokens, more than .* 40"):
        schedule(torch.cat([ids, ids]))
    with pytest.raises(TypeError, match=r"top_experts is torch.float32: ids are"):
        schedule(ids.float())
    with pytest.raises(ValueError, match="num_local_experts is 0: it must be"):
        schedule(ids, 0)
    args = list(arguments(case))
    built = schedule(ids)
    with pytest.raises(ValueError, match=r"swiglu_limit is 0\.0: it must be positive"):
        functional.forward(config, workspace, built, *args, 0)
    args[-1] = (args[-1], args[-1])
    with pytest.raises(NotImplementedError, match=r"w_\w+ is a tuple: quantised weights"):
        functional.forward(config, workspace, built, *args)
    x, _, shared_gate, shared_up, _, gate, up, _ = args
    for weights in ((shared_gate, shared_up, (gate, gate), up), (shared_gate, (up, up), gate, up)):
        with pytest.raises(NotImplementedError, match=r"w_\w+ is a tuple: quantised weights"):
            functional.recompute_forward_context(config, workspace, built, x, *weights)


@pytest.mark.parametrize("bad", [None, [1, 2]], ids=["None", "list"])
def test_arguments_that_are_no_tensors_are_named(bad):
    case, config = make_case(T, K, E, H, I, shared=24), MoKConfig()
    workspace = get_workspace(config, case)
    schedule = functional.build_schedule(workspace, config, case.topk_ids_TK, num_local_experts=E)
    args = arguments(case)
    out, context = functional.forward(config, workspace, schedule, *args)
    names = ("x", "router_weights", *(f"w_shared_{part}" for part in ("gate", "up", "down")))
    names += tuple(f"w_routed_{part}" for part in ("gate", "up", "down"))
    kind = "None" if bad is None else "a list"
    for i, name in enumerate(names):
        if bad is None and name.startswith("w_shared"):
            continue  # no shared expert
        wrong = (*args[:i], bad, *args[i + 1 :])
        expected = pytest.raises(TypeError, match=f"^{name} is {kind}: it must be a tensor")
        with expected:
            functional.forward(config, workspace, schedule, *wrong)
        with expected:
            functional.backward(config, workspace, schedule, context, out, *wrong)
        if i in (1, 4, 7):
            continue
        x, _, shared_gate, shared_up, _, gate, up, _ = wrong
        with expected:
            functional.recompute_forward_context(
                config, workspace, schedule, x, shared_gate, shared_up, gate, up
            )
    with pytest.raises(TypeError, match=f"^d_output is {kind}: it must be a tensor"):
        functional.backward(config, workspace, schedule, context, bad, *args)
    with pytest.raises(TypeError, match=f"^context is {kind}: pass what forward returned"):
        functional.backward(config, workspace, schedule, bad, out, *args)
    with pytest.raises(TypeError, match=f"^top_experts is {kind}: pass a tensor"):
        functional.build_schedule(workspace, config, bad, num_local_experts=E)


def test_a_context_of_other_settings_is_refused():
    case, config = make_case(T, K, E, H, I), MoKConfig()
    workspace = get_workspace(config, case)
    schedule = functional.build_schedule(workspace, config, case.topk_ids_TK, num_local_experts=E)
    args = arguments(case)
    out, context = functional.forward(config, workspace, schedule, *args, 7.0)
    message = "context was made with swiglu_limit = 7.0, this backward has None"
    with pytest.raises(ValueError, match=message):
        functional.backward(config, workspace, schedule, context, out, *args)
    functional.backward(config, workspace, schedule, context, out, *args, 7)
    other = MoKConfig(activation="gpt_oss")
    with pytest.raises(ValueError, match="context was made with activation = 'swiglu'"):
        functional.backward(other, workspace, schedule, context, out, *args, 7.0)
