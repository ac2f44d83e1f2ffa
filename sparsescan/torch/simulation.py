"""Simulations as functions of PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import DeviceError, InputError, InputTypeError, short
from ..simulate import ImplicitSteps, TimeSteps
from ..simulate.params import Leaves
from ..simulate.run import Run
from .calls.direct import is_mapped, uncompiled
from .calls.once import Once, as_batch

_REVERSE = (
    "expected a backward pass of torch.autograd (backward, grad, functional.jacobian), or "
    "sparsescan.jax.simulate, which has vmap"
)


def simulate(
    sim: ImplicitSteps | TimeSteps,
    u0: Tensor,
    params: Any = None,
    *,
    steps: int | None = None,
    dt: float | Tensor,
    last: bool = False,
    **options: Any,
) -> Tensor:
    """Return the states of a simulation, differentiable in the initial state, parameters and steps.

    This is :meth:`sparsescan.simulate.TimeSteps.forward` for PyTorch tensors in host memory. The
    function of the simulation is still of NumPy or JAX. States are computed in float64.

    There are first derivatives, by ``backward`` and ``torch.autograd.grad``, also for several
    losses at once (``is_grads_batched=True``). Second derivatives, transforms of ``torch.func`` and
    forward mode raise. In a compiled program the call runs uncompiled, between two graphs.

    Parameters
    ----------
    sim : ImplicitSteps or TimeSteps
        The simulation.
    u0 : Tensor, shape (n,) or (batch, n)
        The initial state, or one for each sample.
    params : Tensor, float, dict, tuple or None
        Parameters; a dict or a tuple holds tensors or numbers.
    steps : int, optional
        The number of steps; by default the number of lengths in `dt`.
    dt : float or Tensor, shape () or (steps,)
        The length of all steps, or of each step. With ``until=`` it is the first length to try, and
        its gradient is zero.
    last : bool, default False
        Whether to return only the last state. `memory_limit` needs this.
    **options
        Options of ``sim.forward``. With ``t_eval=`` only the states at these times are returned.

    Returns
    -------
    Tensor, shape (steps + 1, n) or (n,)
        The states, the initial one first, or those at `t_eval`; or the last state. If `u0` has an
        axis of samples, so has the result, before the last axis. The dtype is that of `u0`.

    Raises
    ------
    InputTypeError, DeviceError
        If `u0` is not a dense tensor of real numbers in host memory.
    InputError, NewtonError, MemoryLimitError
        As ``sim.forward``. InputError also under a transform of ``torch.func`` or in forward mode.
    RuntimeError
        In the backward pass, for second derivatives.

    Examples
    --------
    >>> import numpy as np, torch
    >>> from sparsescan.simulate import TimeSteps
    >>> from sparsescan.torch import simulate
    >>> sim = TimeSteps(lambda u, t, p: -p * u, np.eye(2))
    >>> decay = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    >>> u = simulate(sim, torch.ones(2), decay, steps=10, dt=0.1)
    >>> u[-1].sum().backward()
    >>> bool(torch.isclose(decay.grad, torch.tensor(-2 * 1.05**-11, dtype=torch.float64)))
    True
    """
    if torch.compiler.is_compiling():
        states: Tensor = _uncompiled(sim, u0, params, steps=steps, dt=dt, last=last, **options)
        return states
    if not isinstance(sim, ImplicitSteps | TimeSteps):
        raise InputTypeError(f"sim is {short(sim)}; expected ImplicitSteps or TimeSteps")
    if not isinstance(u0, Tensor):
        raise InputTypeError(f"u0 is {short(u0)}; expected a tensor")
    if torch._C._are_functorch_transforms_active():
        raise InputError(f"simulate is called under a transform of torch.func; {_REVERSE}")
    own = Leaves.of(params)
    leaves = [u0, dt, *own.leaves]
    for name, leaf in zip(["u0", "dt", *own.titles], leaves, strict=True):
        if not isinstance(leaf, Tensor):
            continue
        if leaf.device.type != "cpu":
            raise DeviceError(f"{name} is on {leaf.device}; expected a tensor on the CPU")
        if leaf.layout is not torch.strided:
            raise InputTypeError(f"{name} has layout {leaf.layout}; expected a dense tensor")
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(leaf).tangent is not None:
            raise InputError(f"{name} has a tangent of forward mode; {_REVERSE}")
    structure = own._replace(leaves=[])
    found: Tensor = _Simulate.apply(sim, structure, steps, last, options, *leaves)
    return found


_uncompiled = uncompiled(simulate)


def _array(leaf: Any) -> Any:
    """Return a parameter for the simulation: a tensor as an array, a number unchanged."""
    if not isinstance(leaf, Tensor):
        return leaf
    leaf = leaf.detach().resolve_neg().resolve_conj()
    array = (leaf.double() if leaf.is_floating_point() else leaf).numpy()
    return array if array.ndim else array[()]


class _Simulate(torch.autograd.Function):
    """A simulation, and its gradients."""

    @staticmethod
    def forward(
        ctx: Any, sim: Any, structure: Leaves, steps: Any, last: bool, options: Any, *leaves: Any
    ) -> Tensor:
        u0, dt, *own = map(_array, leaves)
        run: Run = sim.forward(u0, structure.joined(own), steps=steps, dt=dt, **options)
        ctx.run, ctx.last, ctx.leaves = run, last, leaves
        found = run.last if last else run.states
        if found is None:
            raise InputTypeError("last is False; expected True: memory_limit keeps no other state")
        if not last and run.evaluated is not None:
            found = found[run.evaluated]
        return torch.from_numpy(np.array(found)).to(leaves[0].dtype)

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> Any:
        def call(above: Tensor) -> list[Tensor | None]:
            return _grads(ctx.run, ctx.last, ctx.leaves, above)

        if is_mapped(above):
            found = as_batch(call, above)
        elif torch.is_grad_enabled():
            about = "a simulation", "differences of gradients"
            tensors = (leaf for leaf in ctx.leaves if isinstance(leaf, Tensor))
            found = list(Once.apply(call, (above,), *about, above, *tensors))
        else:
            found = call(above)
        return None, None, None, None, None, *found


def _grads(run: Run, last: bool, leaves: tuple[Any, ...], above: Tensor) -> list[Tensor | None]:
    """Return gradients for tensors, None for numbers; with `above`'s axis of losses, if any."""
    numbers, shape = _array(above), run.last.shape
    lead = numbers.shape[: numbers.ndim - len(shape) - (not last)]
    if not last and run.evaluated is not None:
        some, numbers = numbers, np.zeros((*lead, run.steps + 1, *shape))
        np.moveaxis(numbers, len(lead), 0)[run.evaluated] = np.moveaxis(some, len(lead), 0)
    grads = run.backward(**{"grad_last" if last else "grad_states": numbers})
    in_dt = grads.dt
    if isinstance(leaves[1], Tensor) and np.ndim(in_dt) > len(lead) + leaves[1].ndim:
        in_dt = np.zeros(lead)  # in the first length to try
    arrays = [grads.u0, in_dt, *Leaves.of(grads.params).leaves]
    return [
        torch.as_tensor(np.asarray(grad)).to(leaf.dtype).reshape((*lead, *leaf.shape))
        if isinstance(leaf, Tensor)
        else None
        for leaf, grad in zip(leaves, arrays, strict=True)
    ]
