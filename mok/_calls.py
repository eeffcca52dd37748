"""What the checks of `mok.moe` have found for calls of equal settings, sizes and dtypes.

A training step makes the same call again and again: looking at its arguments once is enough, as
long as everything that the checks depend on is in the key. What may differ between calls of one key
(T, the shapes of other weights and of biases, their devices) is looked at by the op, in C++.
"""

import weakref
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from mok import _workspace
from mok._group import is_registered
from mok.shapes import LayerSettings


class _Known(NamedTuple):
    settings: LayerSettings
    group: weakref.ref | None  # the next object may get a destroyed one's id


_NUMBERS = frozenset((float, int, type(None)))
_known: dict[tuple, _Known] = {}
_MOST = 4096  # without max_tokens each T is a call of its own


def key_of(
    x_TH: Tensor,
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    w_gate: Tensor,
    shared: tuple | None,
    shared_weight_T: Tensor | None,
    activation: str,
    swiglu_limit: float | None,
    group: dist.ProcessGroup | None,
    max_tokens: int | None,
    save: str,
    ring_rows: int | None,
    *settings,
) -> tuple | None:
    """All that the settings of a call and the checks of `mok.moe` depend on; None if an argument
    is of a wrong type, which those checks will say, or may change (a limit that is a tensor)."""
    if type(swiglu_limit) not in _NUMBERS:
        return None
    try:
        return (
            x_TH.shape if max_tokens is None else x_TH.shape[1:],
            x_TH.dtype,
            x_TH.device,
            topk_ids_TK.shape[1:],
            topk_ids_TK.dtype,
            topk_weights_TK.dtype,
            w_gate.shape,
            w_gate.device,
            type(shared),  # a dict of three has the length of (gate, up, down)
            None if shared is None else len(shared),
            None if shared_weight_T is None else shared_weight_T.dtype,
            activation,
            swiglu_limit,
            None if group is None else id(group),
            max_tokens,
            type(max_tokens),  # 128.0 is equal to 128
            save,
            ring_rows,
            type(ring_rows),
            *settings,
        )
    except (AttributeError, TypeError):
        return None


def settings_of(key: tuple | None, group: dist.ProcessGroup | None) -> LayerSettings | None:
    """Those of an earlier call of this key, unless its workspace or group has come to its end."""
    try:
        known = _known.get(key)
    except TypeError:  # a setting that no call can have, such as a list: it will be refused
        return None
    if known is None:
        return None
    name = known.settings.workspace
    if name in _workspace.closed_names or name in _workspace.failures:
        return None
    if known.group is not None and (known.group() is not group or not is_registered(group)):
        return None
    return known.settings


def remember(key: tuple, group: dist.ProcessGroup | None, settings: LayerSettings) -> None:
    if len(_known) >= _MOST:
        _known.clear()
    try:
        _known[key] = _Known(settings, None if group is None else weakref.ref(group))
    except TypeError:
        return
