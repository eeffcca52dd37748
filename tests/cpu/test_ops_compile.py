"""`mok.moe` under torch.compile, activation checkpointing, and both."""

import functools
import os

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

os.environ.setdefault("MOK_POISON", "1")  # the executor's scratch is NaN at the start of every call

import mok
from tests._numerics import assert_bitwise_equal, call, make_case, run

BF16, FP32 = torch.bfloat16, torch.float32
FULL = {"bias": True, "shared": 24, "shared_gate": True}
BACKENDS = ("aot_eager", "inductor")


class OpCounter(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.forwards = self.backwards = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.forwards += func is torch.ops.mok.moe_forward.default
        self.backwards += func is torch.ops.mok.moe_backward.default
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def compiled_moe(**options):
    """`mok.moe` in one graph, as a function with its signature."""

    def function(*args, **kwargs):
        return mok.moe(*args, **kwargs)

    return torch.compile(function, fullgraph=True, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("save", ["all", "none"])
def test_fullgraph_gives_the_same_bits(backend, save):
    case = make_case(20, 3, 5, 16, 72, **FULL)
    expected = run(mok.moe, case, BF16, save=save)
    assert_bitwise_equal(run(compiled_moe(backend=backend), case, BF16, save=save), expected)


@pytest.mark.parametrize("dynamic", [None, True])
def test_any_number_of_tokens(dynamic):
    """T = 0 and 1 specialise, all the others share one dynamic graph."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    function = compiled_moe(backend=counter, dynamic=dynamic)
    whole = make_case(40, 3, 5, 16, 24, **FULL)
    for tokens in (0, 1, 7, 20, 33, 40, 1, 0, 2):
        case = whole.tokens(0, tokens)
        assert_bitwise_equal(run(function, case, BF16), run(mok.moe, case, BF16))
    assert counter.frame_count <= 4


def test_the_save_policy_and_ring_are_settings_of_the_graph():
    case = make_case(60, 3, 5, 16, 24, **FULL)
    function = compiled_moe(backend="aot_eager")
    expected = run(mok.moe, case, BF16)
    for options in ({"save": "all"}, {"ring_rows": 128}, {"ring_rows": 200, "max_tokens": 77}):
        assert_bitwise_equal(run(function, case, BF16, **options), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_frozen_weights(backend):
    case = make_case(20, 3, 5, 16, 24, **FULL)
    frozen = {"w_up", "b_gate", "shared_down", "x_TH"}
    expected = run(mok.moe, case, FP32, frozen=frozen)
    assert_bitwise_equal(run(compiled_moe(backend=backend), case, FP32, frozen=frozen), expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("tokens", [0, 6])
def test_an_unused_forward_stays_in_the_graph(tokens, backend):
    """Its peers would wait for it."""
    case = make_case(tokens, 2, 3, 16, 24)

    def function(x_TH):
        call(mok.moe, case.tensors | {"x_TH": x_TH}, case.topk_ids_TK)
        return x_TH + 1

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    with OpCounter() as counter:
        compiled(case.tensors["x_TH"].requires_grad_())
    assert counter.forwards == 1


@pytest.mark.parametrize(("tokens", "used"), [(0, True), (0, False), (6, False)])
def test_inductor_keeps_forwards_whose_output_is_empty_or_unused(tokens, used):
    """Also where there is nothing to compute: this rank's experts serve its peers."""
    case = make_case(tokens, 2, 3, 16, 24)
    leaves = {name: tensor.requires_grad_() for name, tensor in case.tensors.items()}

    @functools.partial(torch.compile, fullgraph=True, backend="inductor")
    def function(leaves):
        out_TH = call(mok.moe, leaves, case.topk_ids_TK)
        return out_TH if used else leaves["x_TH"] + 1

    function(leaves)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function(leaves).sum().backward()
    calls = [event.name for event in profile.events() if event.name.startswith("mok::")]
    assert calls.count("mok::_moe_forward") == 1
    assert calls.count("mok::moe_backward_out") == used


def save_mok(context, op, *args, **kwargs):
    saved = op.namespace == "mok"
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_mok(context, op, *args, **kwargs):
    saved = op.namespace != "mok"
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.MUST_RECOMPUTE


def checkpointed(policy=None):
    options = {}
    if policy is not None:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)

    def function(*args, **kwargs):
        return checkpoint(mok.moe, *args, use_reentrant=False, **options, **kwargs)

    return function


@pytest.mark.parametrize(("policy", "forwards"), [(None, 2), (save_mok, 1), (recompute_mok, 2)])
@pytest.mark.parametrize("save", ["all", "none"])
def test_checkpointing(policy, forwards, save):
    case = make_case(20, 3, 5, 16, 72, **FULL)
    expected = run(mok.moe, case, FP32, save=save)
    with OpCounter() as counter:
        results = run(checkpointed(policy), case, FP32, save=save)
    assert_bitwise_equal(results, expected)
    assert (counter.forwards, counter.backwards) == (forwards, 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("policy", [None, save_mok, recompute_mok])
def test_compiled_checkpointing(policy, backend):
    case = make_case(20, 3, 5, 16, 72, **FULL)
    function = torch.compile(checkpointed(policy), fullgraph=True, backend=backend)
    assert_bitwise_equal(run(function, case, FP32), run(mok.moe, case, FP32))


def test_two_layers_in_one_graph():
    case = make_case(20, 3, 5, 16, 24, **FULL)

    def twice(x_TH, *rest, **kwargs):
        return mok.moe(mok.moe(x_TH, *rest, **kwargs), *rest, **kwargs)

    compiled = torch.compile(twice, fullgraph=True, backend="inductor")
    assert_bitwise_equal(run(compiled, case, BF16), run(twice, case, BF16))


def test_wrong_arguments_are_named_at_trace_time():
    case = make_case(5, 2, 3, 16, 24)
    case.tensors["w_down"] = case.tensors["w_down"][:, :8]
    with pytest.raises(Exception, match=r"w_down has shape \(3, 8, 24\)"):
        call(compiled_moe(backend="eager"), case.tensors, case.topk_ids_TK)
