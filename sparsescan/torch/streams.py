"""Streams of modules: some steps of a sequence at a time, with states inside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import DeviceError, InputError, InputTypeError, short
from ..recurrent import Recurrent
from ..recurrent.stream_parts import Part, layer_parts, recurrent_part
from ..recurrent.streams import BaseStream
from .calls.direct import is_recorded
from .calls.recorded import address_of_tensor, is_contiguous
from .calls.team import pytorchs_threads
from .networks import array_of, as_network


class TensorStream(BaseStream):
    """Run a module on a sequence that comes bit by bit; :func:`sparsescan.torch.stream` returns it.

    Attributes
    ----------
    batch, inputs, outputs : int
        How many samples there are, and numbers of an input and of an output.
    dtype : torch.dtype
        The dtype of inputs, outputs, states and parameters.
    state : Tensor, tuple of Tensor, or list of these
        A copy of the states, in the form of ``hx``: ``(layers, batch, hidden_size)``, of an LSTM
        ``(h, c)``; a list if there are several recurrent modules. What is set is copied.
    """

    def __init__(self, module: nn.Module, batch: int = 1) -> None:
        self._leaves = list(_leaves(module))
        parts = list(_parts(self._leaves))
        if not any(part.sizes for part in parts):
            raise InputError(f"module is {short(module)}; expected a recurrent module in it")
        super().__init__(parts, batch, (module, batch))
        self.dtype = torch.float32 if self._dtype == np.float32 else torch.float64
        self._step_at = self._passes.step_at
        self._is_direct = self.is_whole and self._passes.is_alone

    def update(self) -> None:
        """Read all parameters again; states stay."""
        every = [each for leaf, _ in self._leaves for each in leaf.modules()]
        held = [
            (own, name, tensor)
            for each in every
            for own in (each._parameters, each._buffers)
            for name, tensor in own.items()
            if tensor is not None
        ]
        # Those that are made in inference mode have no versions.
        seen = [
            (own.get, name, tensor, tensor._version, address_of_tensor(tensor))
            for own, name, tensor in held
            if not tensor.is_inference()
        ]
        super().update()
        self._seen = seen

    @property
    def state(self) -> Any:
        """A copy of the states."""
        states = [
            tuple(each.clone() for each in torch.from_numpy(array).split(part.sizes, -1))
            for part, array in zip(self._recurrent, self.get_states(), strict=True)
        ]
        forms = [each if len(each) > 1 else each[0] for each in states]
        return forms if len(forms) > 1 else forms[0]

    @state.setter
    def state(self, states: Any) -> None:
        parts = self._recurrent
        forms = states if len(parts) > 1 else [states]
        if not isinstance(forms, list | tuple) or len(forms) != len(parts):
            raise InputTypeError(f"state is {short(states)}; expected {len(parts)} of them")
        given = []
        for part, form in zip(parts, forms, strict=True):
            tensors = form if isinstance(form, list | tuple) else [form]
            if len(tensors) != len(part.sizes) or not all(isinstance(e, Tensor) for e in tensors):
                raise InputTypeError(
                    f"state is {short(form)}; expected {len(part.sizes)} of tensors"
                )
            for tensor, size in zip(tensors, part.sizes, strict=True):
                expected = len(part.network.cells), self.batch, size
                if tuple(tensor.shape) != expected:
                    raise InputError(f"state has shape {tuple(tensor.shape)}; expected {expected}")
            given.append(torch.cat([each.detach().cpu() for each in tensors], -1).numpy())
        self.set_states(given)

    @property
    def _recurrent(self) -> list[Part]:
        return [part for part in self._parts if part.sizes]

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the outputs of the next steps.

        Parameters
        ----------
        x : Tensor, shape (steps, batch, inputs) or (batch, inputs)
            The inputs of some steps, of none, or those of one, on the CPU.
        out : Tensor, optional
            Where to write the outputs: contiguous, of the shape and dtype that is returned.

        Returns
        -------
        Tensor, shape (steps, batch, outputs) or (batch, outputs)
            The outputs, without a graph: a new tensor, or `out`.

        Raises
        ------
        InputError, InputTypeError, DeviceError
            If a shape, a dtype or a device is wrong; if `x` requires a gradient while gradients
            are enabled; if `out` shares memory with `x`; or under transforms of ``torch.func``,
            forward mode and ``torch.jit.trace``.
        """
        self._check("x", x)
        if is_recorded():
            raise InputError(
                "a transform of torch.func, forward mode or torch.jit.trace is at work, which a "
                "stream does not take; expected a call outside of it"
            )
        if x.requires_grad and torch.is_grad_enabled():
            raise InputError(
                "x requires a gradient, which a stream does not compute; expected x.detach(), or "
                "a call under torch.no_grad()"
            )
        steps, shape = self.extent_of(x.shape)
        if not is_contiguous(x) or x.is_neg():
            x = x.resolve_neg().contiguous()
        if out is None:
            out = x.new_empty(shape)
        else:
            self._check_result(x, out, shape)
        with self._lock:
            for get, name, tensor, version, address in self._seen:
                if (
                    get(name) is not tensor
                    or tensor._version != version
                    or address_of_tensor(tensor) != address
                ):
                    self.update()
                    break
            if steps == 1 and self._is_direct:
                self._step_at(address_of_tensor(x), address_of_tensor(out))
            else:
                self._run(steps, x, out)
        return out

    def _check(self, name: str, tensor: Any) -> None:
        if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
            raise InputTypeError(f"{name} is {short(tensor)}; expected a tensor")
        if tensor.dtype is not self.dtype:
            raise InputTypeError(f"{name} has dtype {tensor.dtype}; expected {self.dtype}")
        if not tensor.is_cpu:
            raise DeviceError(f"{name} is on {tensor.device}; expected a tensor on the CPU")

    def _check_result(self, x: Tensor, out: Any, shape: tuple[int, ...]) -> None:
        self._check("out", out)
        if out.shape != shape or not is_contiguous(out) or out.is_neg():
            raise InputError(
                f"out has shape {tuple(out.shape)} and strides {out.stride()}; expected a "
                f"contiguous tensor of shape {shape}"
            )
        if out.requires_grad and torch.is_grad_enabled():
            raise InputError("out requires a gradient; expected one that does not")
        if np.may_share_memory(x.detach().numpy(), out.detach().numpy()):
            raise InputError("out shares memory with x; expected a tensor of its own")

    def _run(self, steps: int, x: Tensor, out: Tensor) -> None:
        """Compute the outputs of some steps, of which the first numbers are the caller's."""
        whole = out
        if not self.is_whole:
            whole = x.new_empty((*x.shape[:-1], self._passes.width))
        with nullcontext() if self._passes.is_alone else pytorchs_threads():
            self._passes.run_at(steps, address_of_tensor(x), address_of_tensor(whole))
        if whole is not out:
            with torch.no_grad():
                out.copy_(whole[..., : self.outputs])


def stream(module: nn.Module, batch: int = 1) -> TensorStream:
    """Return a stream of a module, which runs it on a sequence that comes bit by bit.

    ``y = stream(x)`` reads some steps, one or a million, and returns their outputs; the next call
    goes on from there, with the states inside. Results do not depend on how a sequence is cut: they
    have the bits of one call. They are those of inference, without a graph: dropout is left out,
    and random masks are their expectation.

    Weights are packed once, on the CPU. A parameter that is replaced, moved or changed by PyTorch,
    as an optimiser does it, is read by the next call. PyTorch does not count what is written
    through ``param.data`` or an array of NumPy, nor changes of parameters that were made in
    inference mode: these are seen after ``stream.update()``.

    Calls of one stream wait for each other; streams of their own run at once in threads, and leave
    the GIL to others while they compute. A stream can be copied and pickled, with its module. What
    else is done to the module later, such as a hook, has no effect.

    Parameters
    ----------
    module : torch.nn.Module
        A recurrent module of PyTorch or of :mod:`sparsescan.torch`, of one direction, without hooks
        and a ``forward`` of its own; or a :class:`torch.nn.Sequential` of these and of ``Linear``,
        ``LayerNorm`` and functions, each of which reads the outputs of the one before.
    batch : int, default 1
        How many samples run at once, each with states of its own.

    Returns
    -------
    TensorStream
        It takes inputs ``(steps, batch, inputs)``, or ``(batch, inputs)`` of one step, whatever
        `batch_first` is. ``reset(which)``, ``state`` and ``clone()`` are as of :class:`.Stream`.

    Raises
    ------
    InputError, InputTypeError
        If the module has two directions, or a part that is not listed here.
    MemoryLimitError
        If it would take more memory than there is.

    Examples
    --------
    >>> import torch
    >>> import sparsescan.torch
    >>> model = torch.nn.Sequential(torch.nn.LSTM(1, 40), torch.nn.Linear(40, 1))
    >>> stream = sparsescan.torch.stream(model)
    >>> stream(torch.zeros(480, 1, 1)).shape, stream(torch.zeros(1, 1)).shape
    (torch.Size([480, 1, 1]), torch.Size([1, 1]))
    """
    return TensorStream(module, batch)


def _leaves(module: Any) -> Iterator[tuple[nn.Module, Any]]:
    """Yield modules one after the other, with the network that each recurrent one is."""
    if not isinstance(module, nn.Module):
        raise InputTypeError(f"module is {short(module)}; expected a torch.nn.Module")
    network = as_network(module)
    if isinstance(network, nn.Sequential):
        for each in network:
            yield from _leaves(each)
    else:
        yield module, network if isinstance(network, Recurrent) else None


def _parts(leaves: list[tuple[nn.Module, Any]]) -> Iterator[Part]:
    width, layers = 0, list[nn.Module]()
    for module, network in leaves:
        if network is None:
            layers.append(module)
            continue
        yield from (behind := layer_parts(layers, width, array_of))
        layers, width = [], behind[-1].outputs if behind else width
        if width not in (0, network.input_size):
            raise InputError(
                f"{short(module)} is behind {width} outputs; expected {network.input_size}"
            )
        yield (part := _recurrent_part(module, network))
        width = part.outputs
    yield from layer_parts(layers, width, array_of)


def _recurrent_part(module: nn.Module, network: Any) -> Part:
    return recurrent_part(network, lambda name: array_of(module, name))
