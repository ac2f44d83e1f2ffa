"""RNN, GRU and LSTM in place of PyTorch's: the same modules, by kernels for whole sequences."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ._direct import is_recorded
from ._recurrent_op import Shape, has_kernels, run
from ._structure import is_pruning

__all__ = ["GRU", "LSTM", "RNN"]

_DTYPES = (torch.float32, torch.float64)


class _Recurrent(nn.RNNBase):
    """The forward pass of all three, in place of PyTorch's.

    They are no subclasses of PyTorch's modules, since ``torch.compile`` leaves those out.
    """

    _theirs: ClassVar[Any]

    def forward(self, input: Any, hx: Any = None) -> Any:  # noqa: A002, PyTorch's name
        weights: list[Tensor] = [weight for each in self.all_weights for weight in each]
        if is_recorded() or not self._takes(input, hx, weights):
            return self._theirs.forward(self, input, hx)
        if isinstance(input, PackedSequence):
            return self._packed(input, hx, weights)
        is_batched = input.dim() == 3
        x = input if is_batched else input.unsqueeze(1)
        if self.batch_first and is_batched:
            x = x.transpose(0, 1)
        state = None if hx is None else _joined(hx)
        if state is not None and not is_batched:
            state = state.unsqueeze(1)
        output, last = self._run(x, state, None, weights)
        if not is_batched:
            output, last = output.squeeze(1), last.squeeze(1)
        elif self.batch_first:
            output = output.transpose(0, 1)
        return output, self._parted(last)

    def _takes(self, given: Any, hx: Any, weights: list[Tensor]) -> bool:
        """Return whether there are kernels for this; PyTorch computes, or refuses, the rest."""
        is_packed = isinstance(given, PackedSequence)
        x = given.data if is_packed else given
        states = () if hx is None else hx if isinstance(hx, tuple) else (hx,)
        if (
            self.proj_size
            or (states and len(states) != 1 + (self.mode == "LSTM"))
            or not all(isinstance(each, Tensor) for each in (x, *states))
            or x.dtype not in _DTYPES
            or any(each.dtype != x.dtype or each.device != x.device for each in (*states, *weights))
            or not has_kernels(self.mode, self.hidden_size, x)
            or torch.is_autocast_enabled(x.device.type)
            or x.dim() not in ((2,) if is_packed else (2, 3))
            or x.shape[-1] != self.input_size
            or 0 in x.shape
        ):
            return False
        batch: tuple[int, ...] = ()
        if is_packed:
            batch = (int(given.batch_sizes[0]),)
        elif x.dim() == 3:
            batch = (x.shape[0 if self.batch_first else 1],)
        expected = (self.num_layers * (1 + self.bidirectional), *batch, self.hidden_size)
        return all(tuple(each.shape) == expected for each in states)

    def _parted(self, last: Tensor) -> Any:
        """Return the last states as PyTorch does: those of an LSTM as a pair."""
        return last.chunk(2, -1) if self.mode == "LSTM" else last

    def _packed(
        self, given: PackedSequence, hx: Any, weights: list[Tensor]
    ) -> tuple[PackedSequence, Any]:
        """Run samples of different lengths, which are sorted and packed step by step."""
        data, sizes, order, back = given  # sizes are on the CPU
        steps, batch = len(sizes), int(sizes[0])
        has = sizes[:, None] > torch.arange(batch)
        places = torch.nonzero_static(has.flatten(), size=len(data))[:, 0].to(data.device)
        x = data.new_zeros(steps * batch, self.input_size).index_copy(0, places, data)
        state = None if hx is None else _joined(self.permute_hidden(hx, order))
        output, last = self._run(x.reshape(steps, batch, -1), state, has.sum(0), weights)
        rows = output.flatten(0, 1).index_select(0, places)
        states = self.permute_hidden(self._parted(last), back)
        return PackedSequence(rows, sizes, order, back), states

    def _masks(self, shape: Shape, weights: list[Tensor]) -> list[Tensor | None]:
        """Return the masks of pruned weights, or None for others; [] if nothing is pruned.

        They only tell where weights are 0. With other hooks than those of pruning weights may be
        anything.
        """
        hooks: Any = self._forward_pre_hooks.values()
        if not hooks or not all(map(is_pruning, hooks)):
            return []
        pruned, buffers = {hook._tensor_name for hook in hooks}, self._buffers
        masks = [buffers.get(f"{name}_mask") if name in pruned else None for name in shape.names()]
        return [
            mask if mask is not None and mask.shape == weight.shape else None
            for mask, weight in zip(masks, weights, strict=True)
        ]

    def _run(
        self, x: Tensor, state: Tensor | None, lengths: Tensor | None, weights: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Run all layers at once; one after the other if there is dropout between them."""
        flags = bool(self.bias), bool(self.bidirectional)
        shape = Shape(self.mode, self.input_size, self.hidden_size, self.num_layers, *flags)
        masks = self._masks(shape, weights)
        calls = self.num_layers if self.dropout > 0 and self.training else 1
        width, states = len(weights) // calls, self.num_layers // calls * (1 + self.bidirectional)
        lasts = []
        for call in range(calls):
            own = slice(call * width, (call + 1) * width)
            begin = None if state is None else state[call * states : (call + 1) * states]
            given = [x, *weights[own], *([] if begin is None else [begin])]
            keeps = torch.is_grad_enabled() and any(each.requires_grad for each in given)
            x, last, _ = run(
                *(x, begin, lengths, weights[own], masks[own], self.mode, self.hidden_size),
                *(self.num_layers // calls, *flags, keeps),
            )
            lasts.append(last)
            if call + 1 < calls:
                x = nn.functional.dropout(x, self.dropout)
        return x, lasts[0] if calls == 1 else torch.cat(lasts)


def _joined(hx: Any) -> Tensor:
    """Return initial states as the kernels take them: ``[h, c]`` of an LSTM."""
    state: Tensor = torch.cat(hx, -1) if isinstance(hx, tuple) else hx
    return state


class RNN(_Recurrent):
    """Run a simple recurrent network, in place of :class:`torch.nn.RNN`.

    Arguments, attributes, parameters and results are those of PyTorch's module, and so are its
    errors. A whole sequence, and all gradients of it, are computed by the compiled loops of
    :class:`sparsescan.jacobians.TrainingStep`, with any number of layers, in one direction or both,
    and with samples of different lengths (`PackedSequence`). Weights that
    :mod:`torch.nn.utils.prune` has pruned are not read where less than a quarter of them is kept;
    each call reads the contents of the masks.

    Tensors on a CUDA device take the kernels of a GPU, on PyTorch's current stream, where CuPy is
    installed. PyTorch computes all that has no kernel: tensors on other devices, more units than a
    GPU's kernels take, dtypes other than float32 and float64, autocast, `proj_size`, transforms of
    ``torch.func`` and ``torch.jit.trace``.

    Gradients can be computed more than once from one graph (`retain_graph`); a second derivative
    raises `RuntimeError`. A state or an input that is infinite or NaN has no effect through a
    pruned weight that is not read, where PyTorch's product with 0 is NaN.

    Examples
    --------
    >>> import torch
    >>> from sparsescan.torch import RNN
    >>> net = RNN(12, 20, batch_first=True)
    >>> output, state = net(torch.zeros(16, 50, 12))
    >>> output.sum().backward()
    >>> net.weight_hh_l0.grad.shape
    torch.Size([20, 20])
    """

    _theirs = nn.RNN

    def __init__(self, *arguments: Any, **options: Any) -> None:
        _refuse_projections(options)
        if len(arguments) > 3:
            self.nonlinearity = arguments[3]
            arguments = *arguments[:3], *arguments[4:]
        else:
            self.nonlinearity = options.pop("nonlinearity", "tanh")
        if self.nonlinearity not in ("tanh", "relu"):
            raise ValueError(
                f"Unknown nonlinearity '{self.nonlinearity}'. Select from 'tanh' or 'relu'."
            )
        super().__init__(f"RNN_{self.nonlinearity.upper()}", *arguments, **options)


class GRU(_Recurrent):
    """Run a GRU network, in place of :class:`torch.nn.GRU`; see :class:`RNN`."""

    _theirs = nn.GRU

    def __init__(self, *arguments: Any, **options: Any) -> None:
        _refuse_projections(options)
        super().__init__("GRU", *arguments, **options)


class LSTM(_Recurrent):
    """Run an LSTM network, in place of :class:`torch.nn.LSTM`; see :class:`RNN`."""

    _theirs = nn.LSTM
    check_forward_args: Any = nn.LSTM.check_forward_args
    get_expected_cell_size = nn.LSTM.get_expected_cell_size
    permute_hidden: Any = nn.LSTM.permute_hidden

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__("LSTM", *arguments, **options)


def _refuse_projections(options: dict[str, Any]) -> None:
    if "proj_size" in options:
        raise ValueError("proj_size argument is only supported for LSTM, not RNN or GRU")
