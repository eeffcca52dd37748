"""Weights to and from Hugging Face's layouts: in memory, and as transformers writes them."""

import pytest
import torch

import mok
from mok import convert
from tests.cpu._hugging_face import FAMILIES, make_model

E, H, I, J = 6, 16, 24, 8


def block_of(model):
    """(the last MoE block, its name with a dot)."""
    names = [name for name, module in model.named_modules() if name.endswith(".mlp.experts")]
    prefix = names[-1].removesuffix("experts")
    return model.get_submodule(prefix[:-1]), prefix


def assert_same_tensors(first, second):
    assert set(first) == set(second)
    for name, tensor in first.items():
        assert tensor.shape == second[name].shape, name
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_in_memory(family):
    block, _ = block_of(make_model(family))
    state = block.state_dict()
    ours = convert.from_transformers(state, family)
    assert_same_tensors(convert.to_transformers(ours, family), state)


@pytest.mark.parametrize("family", FAMILIES)
def test_files_of_transformers_give_the_same(family, tmp_path):
    """What save_pretrained writes, read without transformers, is what its modules hold."""
    from safetensors.torch import load_file

    model = make_model(family)
    model.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    block, prefix = block_of(model)
    if not any(name.startswith(prefix) for name in files):
        prefix = prefix.replace(".mlp.", ".block_sparse_moe.")  # Mixtral's name on disk
    expected = convert.from_transformers(block.state_dict(), family)
    ours = convert.from_transformers(files, family, prefix=prefix)
    assert_same_tensors(ours, expected)
    written = convert.to_transformers(ours, family, layout="checkpoint", prefix=prefix)
    assert_same_tensors(written, {n: t for n, t in files.items() if n.startswith(prefix)})


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_packed_weights_are_not_copied(family):
    block, _ = block_of(make_model(family))
    ours = convert.from_transformers(block.state_dict(), family)
    for name in ("w_gate", "w_up"):
        weight = ours[f"experts.{name}"]
        packed = block.experts.gate_up_proj
        assert weight.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()
        assert weight.stride(-1) == 1  # so mok.moe takes it as it is


def test_a_share_of_the_experts():
    block, _ = block_of(make_model("deepseek_v3"))
    ours = convert.from_transformers(block.state_dict(), "deepseek_v3")
    part = convert.slice_experts(ours, 2, 4)
    assert torch.equal(part["experts.w_up"], ours["experts.w_up"][2:6])
    assert part["shared.w_up"] is ours["shared.w_up"]


def test_a_layer_loads_what_is_converted():
    block, _ = block_of(make_model("gpt_oss"))
    ours = convert.from_transformers(block.state_dict(), "gpt_oss")
    layer = mok.MoELayer(
        *(32, 24, 8, 3), bias=True, activation="gpt_oss", router="topk_softmax", dtype=torch.float32
    )
    with pytest.raises(RuntimeError, match=r"router\.bias"):
        layer.load_state_dict(ours)  # this router has no bias
    router = mok.router.TopKSoftmaxRouter(32, 8, 3, bias=True)
    layer = mok.MoELayer(32, 24, 8, 3, bias=True, activation="gpt_oss", router=router)
    layer.load_state_dict(ours)
    x = torch.randn(2, 5, 32)
    torch.testing.assert_close(layer(x), block(x)[0], rtol=1e-4, atol=1e-5)


def state_of(family="qwen3_moe"):
    return {
        "gate.weight": torch.zeros(E, H),
        "experts.gate_up_proj": torch.zeros(E, 2 * I, H),
        "experts.down_proj": torch.zeros(E, H, I),
    }


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match="family is 'llama4': it must be one of"):
        convert.from_transformers({}, "llama4")
    with pytest.raises(ValueError, match=r"gate.weight is missing for a block of 'qwen3_moe'"):
        convert.from_transformers({"x": torch.zeros(1)}, "qwen3_moe", prefix="y.")
    with pytest.raises(ValueError, match=r"shared_experts.gate_proj.weight is missing"):
        convert.from_transformers(state_of(), "deepseek_v3")
    extra = state_of() | {"shared_expert.gate_proj.weight": torch.zeros(J, H)}
    with pytest.raises(ValueError, match=r"shared_expert.gate_proj.weight is not known"):
        convert.from_transformers(extra, "qwen3_moe")
    no_experts = {"gate.weight": torch.zeros(E, H)}
    with pytest.raises(ValueError, match=r"experts.gate_up_proj is missing"):
        convert.from_transformers(no_experts, "qwen3_moe")
    a_gap = no_experts | {
        f"experts.{e}.{name}_proj.weight": torch.zeros(I, I)
        for e in (0, 2)
        for name in ("gate", "up", "down")
    }
    with pytest.raises(ValueError, match=r"experts.1.gate_proj.weight is missing"):
        convert.from_transformers(a_gap, "qwen3_moe")
    quantised = {
        "router.weight": torch.zeros(E, H),
        "router.bias": torch.zeros(E),
        "experts.gate_up_proj_blocks": torch.zeros(1),
    }
    with pytest.raises(ValueError, match="experts are stored in MXFP4"):
        convert.from_transformers(quantised, "gpt_oss")
    ours = convert.from_transformers(state_of(), "qwen3_moe")
    with pytest.raises(ValueError, match="layout is 'disk': it must be one of"):
        convert.to_transformers(ours, "qwen3_moe", layout="disk")
    with pytest.raises(ValueError, match=r"experts.b_up has no place in a block of 'qwen3_moe'"):
        convert.to_transformers(ours | {"experts.b_up": torch.zeros(E, I)}, "qwen3_moe")
    with pytest.raises(ValueError, match=r"shared.w_gate is missing"):
        convert.to_transformers(ours, "deepseek_v3")


@pytest.mark.parametrize("change", ["float8", "scales"])
def test_fp8_weights_are_refused(change):
    shapes = {"gate": (8, 16), "up": (8, 16), "down": (16, 8)}
    block = {f"experts.0.{n}_proj.weight": torch.randn(s) for n, s in shapes.items()}
    block["gate.weight"] = torch.randn(1, 16)
    name = "experts.0.up_proj.weight"
    if change == "float8":
        block[name] = block[name].to(torch.float8_e4m3fn)
    else:
        name += "_scale_inv"
        block[name] = torch.ones(1, 1)
    with pytest.raises(ValueError, match=f"mlp.{name} is torch.* of quantised weights: deq"):
        mok.convert.from_transformers(
            {f"mlp.{n}": tensor for n, tensor in block.items()}, "qwen3_moe", prefix="mlp."
        )
