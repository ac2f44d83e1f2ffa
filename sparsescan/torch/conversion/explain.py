"""Explain which kernel runs a call of a recurrent module, and which modules are replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, overload

from torch import nn

from ...capture import loop
from ...errors import InputTypeError, short
from ...formatting import format_time, quantity
from ..calls.direct import is_recorded
from ..calls.prepared import key_of
from ..calls.sequences import Sequences
from ..calls.times import MARGIN, CallPrediction, Key, predict
from ..loops.loop import explained as looped
from ..loops.loop import state_of
from ..scan import explained
from . import torchrecurrent
from .conversion import Conversion, is_replaced, plan_of


class Explanation(NamedTuple):
    """The kernel that runs a call of a recurrent module; prints as one line.

    Attributes
    ----------
    kernel : str
        ``"sparsescan"`` or ``"pytorch"``.
    predicted : float or None
        Its predicted time in seconds; None if unknown.
    other : float or None
        The predicted time of the other kernel in seconds.
    reason : str
        Why this kernel runs.
    """

    kernel: str
    predicted: float | None
    other: float | None
    reason: str

    def __str__(self) -> str:
        return f"{self.kernel}: {self.reason}"


@overload
def explain(module: nn.Module) -> Conversion: ...
@overload
def explain(module: nn.Module, input: Any, hx: Any = None) -> Any: ...
@overload
def explain(module: Callable[..., Any], input: Any, hx: Any) -> loop.Explanation: ...
def explain(module: Any, input: Any = None, hx: Any = None) -> Any:  # noqa: A002
    """Say which kernel a call of a recurrent module runs, its predicted time, and why.

    ``explain(combine_fn, init, xs)`` says whether kernels run a loop of :func:`scan`; if not, it
    names the operator that prevents it, with its line. ``explain(module, input, hx)`` calls a
    module or a function of :func:`.torch.loop` and says which loops it has found and what is in
    their steps, or why Python runs the call; `hx` is its second argument, if it has one.

    Without an input, it lists the modules of a model that are of this package, those that
    :func:`convert` would replace, and those that it would leave alone, with the reason. For
    example, a model that a library has loaded has PyTorch's modules.

    The kernels of this package run whole sequences. For an RNN, GRU or LSTM on the CPU, PyTorch's
    own kernel runs unless its predicted time for the shape is 10% longer. Predictions, with or
    without gradients, come from times that ``sparsescan calibrate`` has measured on this machine,
    or from built-in times of another processor. The choice is made at the first call of a shape.
    Results are equal up to rounding.

    Parameters
    ----------
    module : torch.nn.Module
        A module of :mod:`sparsescan.torch`, or one that :func:`convert` has replaced; without an
        input, any model. Or a step of :func:`scan`, followed by its `init` and `xs`.
    input, hx : optional
        The arguments of the call. As in a call, they, the parameters and
        ``torch.is_grad_enabled()`` decide whether there are gradients.

    Returns
    -------
    Explanation or Conversion
        The kernel, the predicted seconds of both kernels, and the reason. Without an input: the
        modules that are replaced and those that are not, with reasons, as :func:`convert` returns
        them. For a step, `is_captured` says whether kernels run it, and `text` says why not.
        The same holds for what :func:`.torch.loop` returns.

    Raises
    ------
    InputTypeError
        If there is an input and `module` is no recurrent module of this package, or if it is no
        module at all.

    Examples
    --------
    >>> import torch
    >>> from sparsescan.torch import GRU, explain
    >>> explain(GRU(12, 20), torch.zeros(1000, 16, 12)).kernel
    'sparsescan'
    >>> model = torch.nn.Sequential(torch.nn.GRU(3, 5))
    >>> print(explain(model))
    0: left alone, convert has not seen it
    """
    if state_of(module) is not None and input is not None:
        return looped(module, *([input] if hx is None else [input, hx]))
    if input is None:
        plan = plan_of(module)
        names = [
            name
            for name, each in module.named_modules()
            if is_replaced(each) or state_of(each) is not None
        ]
        unseen = dict.fromkeys(plan.replaced, "convert has not seen it")
        return Conversion(names, unseen | plan.left)
    if isinstance(module, nn.Module) and torchrecurrent.is_replacement(module):
        return _ours("torchrecurrent would run a loop in Python")
    if not isinstance(module, Sequences) and callable(module) and hx is not None:
        return explained(module, input, hx)
    if not isinstance(module, Sequences) or not isinstance(module, nn.Module):
        raise InputTypeError(
            f"module is {short(module)}; expected a recurrent module of sparsescan.torch, such as "
            "convert makes"
        )
    weights = [weight for each in module.all_weights for weight in each]
    if is_recorded() or not module._takes(input, hx, weights):
        what = "a dtype, a device, a size or a transform that has no kernel here"
        return Explanation("pytorch", None, None, what)
    if not module.is_usual:
        return _ours("PyTorch knows no memory_limit, truncate or return_states")
    if module._theirs is None:
        return _ours("PyTorch has no kernel for this cell")
    names = module._flat_weights_names
    key = key_of(module, input, hx, list(map(module._parameters.get, names)))
    if key is None:
        return _ours(
            "no choice is made for packed, hooked or checkpointed calls, with dropout, nor on a GPU"
        )
    return _chosen(Key(*key), predict(Key(*key)))


def _ours(reason: str) -> Explanation:
    return Explanation("sparsescan", None, None, reason)


def _chosen(key: Key, times: CallPrediction) -> Explanation:
    assert times.ours is not None
    assert times.theirs is not None
    steps, batch = key.sizes
    ours, theirs = (format_time(1e9 * each) for each in (times.ours, times.theirs))
    reason = (
        f"{'training' if key.has_backward else 'inference'} of {steps:,} steps of {batch:,} "
        f"samples, {quantity(key.threads, 'thread')}: predicted {ours} here, {theirs} by PyTorch"
    )
    if times.is_theirs:
        if times.ours < times.theirs:
            reason += f", which is left if it takes {MARGIN - 1:.0%} longer"
        return Explanation("pytorch", times.theirs, times.ours, reason)
    return Explanation("sparsescan", times.ours, times.theirs, reason)
