"""The parameters of `mok.MoELayer`'s experts and how they are initialised.

Shapes: E experts in all R ranks, H hidden, I intermediate, J the shared expert's intermediate size.
"""

import math

import torch
from torch import Tensor, nn

from mok import ops
from mok.router import no_autocast


class Experts(nn.Module):
    """This rank's expert weights: w_gate, w_up [E/R, I, H], w_down [E/R, H, I], biases or None.

    With R > 1 they carry `allreduce = False`, which is how Megatron knows parameters that are no
    copies of another rank's.
    """

    def __init__(
        self,
        num_experts,
        first_expert,
        hidden_size,
        intermediate_size,
        bias,
        device,
        dtype,
        group_name=None,
        num_ranks=1,
    ):
        super().__init__()
        self.num_experts = num_experts
        self.first_expert = first_expert
        self.group_name = group_name
        self.num_ranks = num_ranks

        def parameter(*shape):
            return nn.Parameter(torch.empty(num_experts, *shape, device=device, dtype=dtype))

        self.w_gate = parameter(intermediate_size, hidden_size)
        self.w_up = parameter(intermediate_size, hidden_size)
        self.w_down = parameter(hidden_size, intermediate_size)
        self.register_parameter("b_gate", parameter(intermediate_size) if bias else None)
        self.register_parameter("b_up", parameter(intermediate_size) if bias else None)
        self.register_parameter("b_down", parameter(hidden_size) if bias else None)
        self.mark()
        self.reset_parameters()

    def forward(self, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, **options):
        """`mok.moe` with these weights: a module's call, so that hooks (FSDP's) see their use."""
        return ops.moe(
            x_TH,
            topk_ids_TK,
            topk_weights_TK,
            self.w_gate,
            self.w_up,
            self.w_down,
            b_gate=self.b_gate,
            b_up=self.b_up,
            b_down=self.b_down,
            **options,
        )

    def mark(self) -> None:
        """Sets the attributes of the parameters; for who replaces them."""
        if self.num_ranks > 1:
            for parameter in self.parameters():
                parameter.allreduce = False

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.mark()  # `to_empty` and the like make new parameters
        return self

    def __setstate__(self, state) -> None:
        super().__setstate__(state)
        self.mark()  # nor do copies and pickles of a parameter keep its attributes

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Each expert as its own `nn.Linear`s, the same for every number of ranks.

        One draw from the CPU's default generator seeds a generator per global expert, so one seed
        gives the same E experts however they are spread; equal seeds on all ranks are assumed.
        """
        if self.w_gate.is_meta:
            return
        seed = int(torch.randint(2**62, (), device="cpu"))
        generator = torch.Generator(device=self.w_gate.device)
        tensors = (self.w_gate, self.w_up, self.w_down, self.b_gate, self.b_up, self.b_down)
        fan_in = (self.w_gate.shape[2], self.w_up.shape[2], self.w_down.shape[2]) * 2
        for e in range(self.num_experts):
            generator.manual_seed(seed + self.first_expert + e)
            for tensor, size in zip(tensors, fan_in, strict=True):
                if tensor is not None:
                    bound = 1 / math.sqrt(size)
                    tensor[e].uniform_(-bound, bound, generator=generator)

    def extra_repr(self) -> str:
        last = self.first_expert + self.num_experts - 1
        return f"experts {self.first_expert}..{last}, bias={self.b_gate is not None}"


class SharedExpert(nn.Module):
    """The expert of every token: w_gate, w_up [J, H], w_down [H, J], equal on all ranks."""

    def __init__(self, hidden_size, intermediate_size, device, dtype):
        super().__init__()

        def parameter(*shape):
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.w_gate = parameter(intermediate_size, hidden_size)
        self.w_up = parameter(intermediate_size, hidden_size)
        self.w_down = parameter(hidden_size, intermediate_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `nn.Linear`, from the default generator."""
        for weight in (self.w_gate, self.w_up, self.w_down):
            bound = 1 / math.sqrt(weight.shape[1])
            nn.init.uniform_(weight, -bound, bound)

    def extra_repr(self) -> str:
        return f"intermediate_size={self.w_gate.shape[0]}"


class SharedExpertGate(nn.Module):
    """sigmoid(x w^T), one FP32 value per token; computed in FP32 whatever the dtypes."""

    def __init__(self, hidden_size, device, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `nn.Linear`, from the default generator."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x_TH: Tensor) -> Tensor:
        with no_autocast(x_TH):
            return torch.sigmoid(nn.functional.linear(x_TH.float(), self.weight.float())).squeeze(1)
