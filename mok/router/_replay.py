"""Recording the routing of a model's forward pass and replaying it in another.

A roll-out engine and a trainer, or two precisions of one model, choose other experts for some
tokens. Replaying gives both the same experts; weights are recomputed, so that gradients still reach
the router.
"""

import contextlib
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from mok.router._base import Router


@contextlib.contextmanager
def record_routing(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yields a dict that fills with each router's `topk_ids_TK` [T, K], by the router's name.

    It holds the last forward pass of each router: record one micro-batch per context. For eager
    mode; a compiled model passes `topk_ids` to its layers itself.

        with mok.router.record_routing(model) as routing:
            model(tokens)
    """
    routing: dict[str, Tensor] = {}

    def keep(name):
        def hook(router, args, kwargs, output):
            routing[name] = output.topk_ids_TK.detach()

        return hook

    with contextlib.ExitStack() as stack:
        for name, router in _routers_of(model).items():
            handle = router.register_forward_hook(keep(name), with_kwargs=True)
            stack.callback(handle.remove)
        yield routing


@contextlib.contextmanager
def replay_routing(model: nn.Module, routing: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, every router of `routing` takes these ids [T, K] and computes their weights.

    Routers that `routing` does not name choose for themselves. -1 is no route. Call backward inside
    as well where activations are checkpointed: it runs the routers again.

    Raises:
        ValueError: for a name that no router of the model has, and in a router's call for ids of
            another number of tokens.
    """
    routers = _routers_of(model)
    unknown = sorted(set(routing) - set(routers))
    if unknown:
        raise ValueError(
            f"routing has {unknown[0]!r}, but no router of the model has that name: there are "
            f"{', '.join(map(repr, routers)) or 'none'}"
        )

    def impose(ids_TK):
        def hook(router, args, kwargs):
            x_TH = args[0] if args else kwargs["x_TH"]
            if len(ids_TK) != len(x_TH):
                raise ValueError(
                    f"the replayed routing has {len(ids_TK)} tokens and the router's input "
                    f"{len(x_TH)}: replay it for the tokens it was recorded for"
                )
            return (x_TH, ids_TK.to(x_TH.device)), {}

        return hook

    with contextlib.ExitStack() as stack:
        for name, ids_TK in routing.items():
            handle = routers[name].register_forward_pre_hook(impose(ids_TK), with_kwargs=True)
            stack.callback(handle.remove)
        yield


def _routers_of(model: nn.Module) -> dict[str, Router]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Router)}
