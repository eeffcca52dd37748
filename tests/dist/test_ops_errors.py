"""When one rank cannot make a call, or makes another one: all raise one sentence, and go on."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

os.environ.setdefault("MOK_POISON", "1")  # the executor's scratch is NaN at the start of every call

import mok
from tests._harness import Died, run_ranks, run_ranks_fresh
from tests._numerics import assert_bitwise_equal, call, make_case, run

BF16, FP32 = torch.bfloat16, torch.float32
FULL = {"bias": True, "shared": 24, "shared_gate": True}
AT_ONCE = 10.0  # seconds; a rank that waits instead waits for 600


def outcome(function):
    """(class name, message, seconds) of what it raises, or None."""
    start = time.monotonic()
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return None


def good_call(rank, group, seed=0):
    """One call that must give the right numbers: the bits of one rank alone."""
    case = make_case(24, 2, 4, 16, 24, **FULL, seed=seed)
    part = case.tokens(8 * rank, 8 * rank + 8).experts(2 * rank, 2 * rank + 2)
    results = run(mok.moe, part, BF16, group=group, max_tokens=16)
    alone = run(mok.moe, case.tokens(0, 8 * group.size()), BF16)
    names = ("out", "dx_TH")
    expected = {name: alone[name][8 * rank : 8 * rank + 8] for name in names}
    assert_bitwise_equal({name: results[name] for name in names}, expected)


def arguments(rank, group, tokens=8):
    case = make_case(tokens, 2, 4, 16, 24, **FULL, seed=9)
    part = case.experts(2 * rank, 2 * rank + 2)
    tensors = {
        name: tensor if name in ("topk_weights_TK", "shared_weight_T") else tensor.to(BF16)
        for name, tensor in part.tensors.items()
    }
    return tensors, part.topk_ids_TK, {"group": group, "max_tokens": 16}


def too_many_tokens(tensors, ids_TK, options):
    for name in ("x_TH", "topk_weights_TK", "shared_weight_T"):
        tensors[name] = tensors[name].repeat(3, *[1] * (tensors[name].dim() - 1))
    return tensors, ids_TK.repeat(3, 1), options


def replaced(name, change):
    def apply(tensors, ids_TK, options):
        return tensors | {name: change(tensors[name])}, ids_TK, options

    return apply


def wrong_ids(tensors, ids_TK, options):
    return tensors, ids_TK.float(), options


def with_option(name, value):
    def apply(tensors, ids_TK, options):
        return tensors, ids_TK, options | {name: value}

    return apply


def flat_ids(tensors, ids_TK, options):
    return tensors, ids_TK[:, 0], options


# What one rank gets wrong: a change of its arguments, and what it says.
WRONG = {
    "T > max_tokens": (too_many_tokens, "ValueError", "x has T = 24 tokens, more than max_tokens"),
    "x in FP16": (replaced("x_TH", torch.Tensor.half), "TypeError", "x is torch.float16"),
    "x in FP64": (replaced("x_TH", torch.Tensor.double), "TypeError", "x is torch.float64"),
    "x of 1 dim": (replaced("x_TH", torch.Tensor.flatten), "ValueError", r"x has shape (128,)"),
    "x of other H": (replaced("x_TH", lambda x: x[:, :8]), "ValueError", "x has H = 8 columns"),
    "x strided": (replaced("x_TH", lambda x: x.T.contiguous().T), "ValueError", "x must have a"),
    "ids of 1 dim": (flat_ids, "ValueError", "topk_ids has shape (8,)"),
    "negative ring": (with_option("ring_rows", -1), "ValueError", "ring_rows is -1"),
    "unknown save": (with_option("save", "most"), "ValueError", "save is 'most'"),
    "max_tokens of text": (with_option("max_tokens", "16"), "ValueError", "max_tokens is '16'"),
    "absent backend": (
        with_option("backend", "megakernel"),
        "NotImplementedError",
        "backend 'megakernel' cannot run here",
    ),
    "x on meta": (replaced("x_TH", lambda x: x.to("meta")), "ValueError", "and x on meta"),
    "ids in FP32": (wrong_ids, "TypeError", "topk_ids is torch.float32"),
    "weights of other T": (
        replaced("topk_weights_TK", lambda w: w[:5]),
        "ValueError",
        "topk_weights has shape (5, 2)",
    ),
    "integer weights": (
        replaced("topk_weights_TK", torch.Tensor.int),
        "TypeError",
        "topk_weights is torch.int32",
    ),
    "bias in FP16": (replaced("b_up", torch.Tensor.half), "TypeError", "b_up is torch.float16"),
    "bias of text": (replaced("b_up", str), "TypeError", "b_up is a str"),
    "no w_down": (replaced("w_down", lambda w: None), "TypeError", "w_down is None"),
    "no activation": (with_option("activation", None), "ValueError", "activation is None"),
    "limit of text": (with_option("swiglu_limit", "7"), "ValueError", "swiglu_limit is '7'"),
}

# All but those whose sizes nobody can read: these need the group's only workspace.
KNOWN_CALLS = set(WRONG) - {"ids of 1 dim", "max_tokens of text"}


def one_rank_is_wrong(rank, group, what, culprit):
    good_call(rank, group)
    change = WRONG[what][0]
    tensors, ids_TK, options = arguments(rank, group)
    if what in KNOWN_CALLS:  # a workspace besides: the peers wait in one of two
        call(mok.moe, tensors, ids_TK, **options, workspace_tag="besides")
    if rank == culprit:
        tensors, ids_TK, options = change(tensors, ids_TK, options)
    raised = outcome(lambda: call(mok.moe, tensors, ids_TK, **options))
    good_call(rank, group, seed=1)
    return raised


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_raises_takes_its_peers_with_it_at_once(what, culprit):
    _, kind, message = WRONG[what]
    ranks = run_ranks if what in KNOWN_CALLS else run_ranks_fresh
    results = ranks(2, one_rank_is_wrong, what, culprit)
    assert results[culprit][0] == kind
    assert message in results[culprit][1]
    name, text, seconds = results[1 - culprit]
    assert name == "PeerAbortedError"
    assert f"rank {culprit}" in text.lower()
    assert message in text
    assert seconds < AT_ONCE
    assert all("\n" not in result[1] for result in results)


def wrong_in_the_first_call(rank, group, what, max_tokens):
    """Before any workspace of these sizes exists."""
    tensors, ids_TK, options = arguments(rank, group)
    options["max_tokens"] = max_tokens
    if rank == 1:
        tensors, ids_TK, options = WRONG[what][0](tensors, ids_TK, options)
    return outcome(lambda: call(mok.moe, tensors, ids_TK, **options))


@pytest.mark.parametrize(
    ("what", "max_tokens"),
    [
        *(("x in FP16", 17), ("x of other H", 18), ("bias in FP16", 19), ("x in FP16", None)),
        *(("no w_down", 20), ("no activation", 21), ("limit of text", 22)),
    ],
)
def test_also_in_the_first_call(what, max_tokens):
    results = run_ranks(2, wrong_in_the_first_call, what, max_tokens)
    assert results[1][0] == WRONG[what][1]
    assert results[0][0] == "PeerAbortedError"
    assert results[0][2] < AT_ONCE


SETTINGS = {
    "save": ({"save": "all"}, {"save": "gate_up"}, "save"),
    "ring_rows": ({"ring_rows": 128}, {"ring_rows": 256}, "ring_rows"),
    "activation": ({"activation": "swiglu"}, {"activation": "gpt_oss"}, "activation"),
    "swiglu_limit": ({"swiglu_limit": 1.0}, {"swiglu_limit": None}, "activation"),
    "limits": ({"swiglu_limit": 1.0}, {"swiglu_limit": 2.0}, "swiglu_limit"),
}


def disagree(rank, group, name):
    good_call(rank, group)
    tensors, ids_TK, options = arguments(rank, group)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    options |= SETTINGS[name][rank]
    raised = outcome(lambda: call(mok.moe, leaves, ids_TK, **options))
    good_call(rank, group, seed=1)
    return raised


def assert_all_name(results, setting):
    for name, text, seconds in results:
        assert name == "ValueError"
        assert "disagree on" in text
        assert setting in text
        assert "\n" not in text
        assert seconds < AT_ONCE


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_differ_are_named_on_all_ranks(name):
    results = run_ranks(2, disagree, name)
    assert_all_name(results, SETTINGS[name][2])
    assert results[0][1] == results[1][1]


def disagree_on_tensors(rank, group, what):
    good_call(rank, group)
    tensors, ids_TK, options = arguments(rank, group)
    frozen = ()
    if rank == 1:
        match what:
            case "frozen":
                frozen = ("w_up", "x_TH")
            case "all frozen":
                frozen = tuple(tensors)
            case "bias":
                del tensors["b_up"]
            case "shared gate":
                del tensors["shared_weight_T"]
            case "shared width":
                for name in ("shared_gate", "shared_up"):
                    tensors[name] = tensors[name][:16]
                tensors["shared_down"] = tensors["shared_down"][:, :16]
            case "intermediate":
                for name in ("w_gate", "w_up"):
                    tensors[name] = tensors[name][:, :16]
                tensors["w_down"] = tensors["w_down"][:, :, :16].contiguous()
                for name in ("b_gate", "b_up"):
                    tensors[name] = tensors[name][:, :16]
            case "experts":
                for name in ("w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down"):
                    tensors[name] = tensors[name].repeat(2, *[1] * (tensors[name].dim() - 1))
    leaves = {n: t.clone().requires_grad_(n not in frozen) for n, t in tensors.items()}
    raised = outcome(lambda: call(mok.moe, leaves, ids_TK, **options))
    good_call(rank, group, seed=1)
    return raised


@pytest.mark.parametrize(
    ("what", "setting"),
    [
        ("frozen", "require grad"),
        ("all frozen", "requires grad"),
        ("bias", "biases"),
        ("shared gate", "shared_weight"),
        ("shared width", "shared_intermediate_size"),
        ("intermediate", "intermediate_size"),
        ("experts", "num_experts"),
    ],
)
def test_tensors_that_differ_are_named_on_all_ranks(what, setting):
    assert_all_name(run_ranks(2, disagree_on_tensors, what), setting)


def forward_meets_backward(rank, group):
    good_call(rank, group)
    tensors, ids_TK, options = arguments(rank, group)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    out = call(mok.moe, leaves, ids_TK, **options)
    if rank == 0:
        raised = outcome(lambda: out.sum().backward())
    else:
        raised = outcome(lambda: call(mok.moe, leaves, ids_TK, **options))
    good_call(rank, group, seed=1)
    out.sum().backward()  # nothing of the first forward is lost
    assert all(leaf.grad.isfinite().all() for leaf in leaves.values())
    return raised


def test_a_forward_that_meets_a_backward():
    assert_all_name(run_ranks(2, forward_meets_backward), "kind of call")


def shapes_differ(rank, group, what):
    """max_tokens, K, H or the dtype differ: another workspace, which its first call refuses."""
    tensors, ids_TK, options = arguments(rank, group)
    options["max_tokens"] = 100 + len(what)
    if rank == 1:
        if what == "max_tokens":
            options["max_tokens"] += 1
        if what == "top_k":
            tensors["topk_weights_TK"] = tensors["topk_weights_TK"][:, :1]
            ids_TK = ids_TK[:, :1]
        if what == "dtype":
            tensors = {name: tensor.float() for name, tensor in tensors.items()}
    return outcome(lambda: call(mok.moe, tensors, ids_TK, **options))


@pytest.mark.parametrize("what", ["max_tokens", "top_k", "dtype"])
def test_sizes_that_differ_in_the_first_call_are_named_on_all_ranks(what):
    for name, text, seconds in run_ranks(2, shapes_differ, what):
        assert name == "SymmetricHeapError"
        assert what in text
        assert "rank 1" in text
        assert seconds < AT_ONCE


def killed_in_the_middle(rank, group, when):
    case = make_case(24, 2, 6, 16, 24, seed=9)
    part = case.tokens(8 * rank, 8 * rank + 8).experts(2 * rank, 2 * rank + 2)
    options = {"group": group, "max_tokens": 16}
    run(mok.moe, part, FP32, **options)
    name = mok.workspace.declare(group, max_tokens=16, hidden_size=16, top_k=2, dtype=FP32)
    mok.workspace.get(name).set_timeout(2.0)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in part.tensors.items()}
    if when == "backward":
        out = call(mok.moe, leaves, part.topk_ids_TK, **options)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if when == "backward":
        raised = outcome(lambda: out.sum().backward())
    else:
        raised = outcome(lambda: call(mok.moe, leaves, part.topk_ids_TK, **options))
    again = outcome(lambda: call(mok.moe, leaves, part.topk_ids_TK, **options))
    alone = run(mok.moe, make_case(8, 2, 4, 16, 24, routing="uniform"), BF16)
    assert alone["out"].isfinite().all()  # other workspaces live on
    return raised, again


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_killed_rank_is_named_by_the_survivors_within_the_time(when):
    results = run_ranks_fresh(3, killed_in_the_middle, when, timeout=60)
    assert isinstance(results[1], Died)
    assert results[1].signal == signal.SIGKILL
    for rank in (0, 2):
        (name, text, seconds), (again, _, seconds_again) = results[rank]
        assert name in ("PeerTimeoutError", "PeerAbortedError")
        assert "rank 1" in text or "rank(s) 1" in text
        assert seconds < 8
        assert again in ("PeerTimeoutError", "PeerAbortedError")
        assert seconds_again < 1
    assert "PeerTimeoutError" in (results[0][0][0], results[2][0][0])


def in_a_forked_child(rank, group):
    """The exit codes of children that call a layer of one rank and the group's layer."""
    good_call(rank, group)
    tensors, ids_TK, options = arguments(rank, group)
    codes = []
    for call_options in ({}, options):
        child = os.fork()
        if child == 0:
            raised = outcome(lambda options=call_options: call(mok.moe, tensors, ids_TK, **options))
            os._exit(0 if raised is None else 1 + (raised[0] == "WorkspaceClosedError"))
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    good_call(rank, group, seed=1)
    return codes


def test_a_forked_child_may_use_layers_of_one_rank_only():
    """A data loader's worker, say: the windows of the group are not its own."""
    works, is_refused = 0, 2
    assert run_ranks(2, in_a_forked_child) == [[works, is_refused]] * 2


def in_a_destroyed_group(rank, group):
    """What the third of three equal calls raises, once the group was destroyed between them."""
    tensors, ids_TK, options = arguments(rank, group)
    own = dist.new_group(backend="gloo")
    options["group"] = own
    for _ in range(2):
        call(mok.moe, tensors, ids_TK, **options)
    dist.destroy_process_group(own)
    return outcome(lambda: call(mok.moe, tensors, ids_TK, **options))


def test_a_destroyed_group_is_refused_by_equal_calls_too():
    for kind, text, _ in run_ranks_fresh(2, in_a_destroyed_group):
        assert kind == "ValueError"
        assert "no process group named" in text
