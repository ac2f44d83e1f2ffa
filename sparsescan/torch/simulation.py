"""Simulations as functions of PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import DeviceError, InputTypeError, short
from ..simulate import ImplicitSteps, Run, TimeSteps
from ..simulate.params import Leaves
from .calls.arrays import array_of


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

    As :meth:`sparsescan.simulate.TimeSteps.forward`, for tensors of PyTorch in host memory. The
    function of the simulation stays one of NumPy or of JAX. States are computed in float64.

    Parameters
    ----------
    sim : ImplicitSteps or TimeSteps
        The simulation.
    u0 : Tensor, shape (n,) or (batch, n)
        The initial state, or those of samples.
    params : Tensor, float, dict, tuple or None
        Parameters; those in a dict or a tuple are tensors or numbers.
    steps : int, optional
        How many steps; by default as many as `dt` has lengths.
    dt : float or Tensor, shape () or (steps,)
        The length of all steps, or of each.
    last : bool, default False
        Whether to return the last state alone, which `memory_limit` asks for.
    **options
        As those of ``sim.forward``.

    Returns
    -------
    Tensor, shape (steps + 1, n) or (n,)
        The states, the initial one first; or the last one; with an axis of samples before the last
        if `u0` has one. It has the dtype of `u0`.

    Raises
    ------
    InputTypeError, DeviceError
        If `u0` is no tensor of real numbers in host memory.
    InputError, NewtonError, MemoryLimitError
        As ``sim.forward``.

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
    if not isinstance(sim, ImplicitSteps | TimeSteps):
        raise InputTypeError(f"sim is {short(sim)}; expected ImplicitSteps or TimeSteps")
    if not isinstance(u0, Tensor):
        raise InputTypeError(f"u0 is {short(u0)}; expected a tensor")
    own = Leaves.of(params)
    leaves = [u0, dt, *own.leaves]
    for name, leaf in zip(["u0", "dt", *own.titles], leaves, strict=True):
        if isinstance(leaf, Tensor) and leaf.device.type != "cpu":
            raise DeviceError(f"{name} is on {leaf.device}; expected a tensor on the CPU")
    structure = own._replace(leaves=[])
    states: Tensor = _Simulate.apply(sim, structure, steps, last, options, *leaves)
    return states


def _array(leaf: Any) -> Any:
    """Return a leaf for the simulation: an array of a tensor, a number as it is."""
    if not isinstance(leaf, Tensor):
        return leaf
    array = array_of(leaf)
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
        return torch.from_numpy(np.array(found)).to(leaves[0].dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> Any:
        numbers = array_of(above)
        grads = ctx.run.backward(**{"grad_last" if ctx.last else "grad_states": numbers})
        own = [grads.u0, grads.dt, *Leaves.of(grads.params).leaves]
        found = [
            torch.as_tensor(np.asarray(grad)).to(leaf.dtype).reshape(leaf.shape)
            if isinstance(leaf, Tensor)
            else None
            for leaf, grad in zip(ctx.leaves, own, strict=True)
        ]
        return None, None, None, None, None, *found
