"""Modules of whole sequences: what those in place of PyTorch's and those of any cell share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ._direct import is_recorded
from ._recurrent_op import has_kernels, names_of, run
from ._structure import is_pruning

__all__ = ["Sequences", "joined"]

_DTYPES = (torch.float32, torch.float64)

Run = Callable[[Tensor, "Tensor | None", "Tensor | None", list[Tensor]], tuple[Tensor, Tensor]]


class Sequences:
    """The forward pass of a recurrent module, with the attributes of :class:`torch.nn.RNNBase`.

    Attributes
    ----------
    mode : str
        What the operators know its cells by.
    states : int
        How many states a cell has; if there are several, those of a call are a tuple of tensors.
    """

    mode: str
    states: int
    input_size: int
    hidden_size: int
    num_layers: int
    bias: bool
    batch_first: bool
    dropout: float
    bidirectional: bool
    training: bool
    all_weights: Any
    permute_hidden: Any
    _buffers: dict[str, Any]
    _forward_pre_hooks: Any

    def forward(self, input: Any, hx: Any = None) -> Any:  # noqa: A002, PyTorch's name
        weights: list[Tensor] = [weight for each in self.all_weights for weight in each]
        if is_recorded() or not self._takes(input, hx, weights):
            return self._without_kernels(input, hx, weights)
        return self._whole(input, hx, weights, self._run)

    def _without_kernels(self, given: Any, hx: Any, weights: list[Tensor]) -> Any:
        """Compute, or refuse, what has no kernels."""
        raise NotImplementedError

    def _whole(self, given: Any, hx: Any, weights: list[Tensor], run: Run) -> Any:
        """Return the results for any form of input, from those for a batch of samples."""
        if isinstance(given, PackedSequence):
            return self._packed(given, hx, weights, run)
        is_batched = given.dim() == 3
        x = given if is_batched else given.unsqueeze(1)
        if self.batch_first and is_batched:
            x = x.transpose(0, 1)
        state = None if hx is None else joined(hx)
        if state is not None and not is_batched:
            state = state.unsqueeze(1)
        output, last = run(x, state, None, weights)
        if not is_batched:
            output, last = output.squeeze(1), last.squeeze(1)
        elif self.batch_first:
            output = output.transpose(0, 1)
        return output, self._parted(last)

    def _takes(self, given: Any, hx: Any, weights: list[Tensor]) -> bool:
        """Return whether there are kernels for this."""
        is_packed = isinstance(given, PackedSequence)
        x = given.data if is_packed else given
        states = () if hx is None else hx if isinstance(hx, tuple) else (hx,)
        if (
            getattr(self, "proj_size", 0)
            or (states and len(states) != self.states)
            or not all(isinstance(each, Tensor) for each in (x, *states))
            or x.dtype not in _DTYPES
            or any(each.dtype != x.dtype or each.device != x.device for each in (*states, *weights))
            or not has_kernels(self.mode, self.hidden_size, x, bool(self.bias))
            or torch.is_autocast_enabled(x.device.type)
            or x.dim() not in ((2,) if is_packed else (2, 3))
            or x.shape[-1] != self.input_size
            or 0 in x.shape
        ):
            return False
        expected = self._state_shape(given)
        return all(tuple(each.shape) == expected for each in states)

    def _state_shape(self, given: Any) -> tuple[int, ...]:
        """Return the shape of a state for an input."""
        batch: tuple[int, ...] = ()
        if isinstance(given, PackedSequence):
            batch = (int(given.batch_sizes[0]),)
        elif given.dim() == 3:
            batch = (given.shape[0 if self.batch_first else 1],)
        return (self.num_layers * (1 + self.bidirectional), *batch, self.hidden_size)

    def _parted(self, last: Tensor) -> Any:
        """Return the last states as PyTorch does: several as a tuple."""
        return last.chunk(self.states, -1) if self.states > 1 else last

    def _packed(
        self, given: PackedSequence, hx: Any, weights: list[Tensor], run: Run
    ) -> tuple[PackedSequence, Any]:
        """Run samples of different lengths, which are sorted and packed step by step."""
        data, sizes, order, back = given  # sizes are on the CPU
        steps, batch = len(sizes), int(sizes[0])
        has = sizes[:, None] > torch.arange(batch)
        places = torch.nonzero_static(has.flatten(), size=len(data))[:, 0].to(data.device)
        x = data.new_zeros(steps * batch, self.input_size).index_copy(0, places, data)
        state = None if hx is None else joined(self.permute_hidden(hx, order))
        output, last = run(x.reshape(steps, batch, -1), state, has.sum(0), weights)
        rows = output.flatten(0, 1).index_select(0, places)
        states = self.permute_hidden(self._parted(last), back)
        return PackedSequence(rows, sizes, order, back), states

    def _masks(self, weights: list[Tensor]) -> list[Tensor | None]:
        """Return the masks of pruned matrices, or None for others; [] if nothing is pruned.

        They only tell where weights are 0. With other hooks than those of pruning weights may be
        anything.
        """
        hooks: Any = self._forward_pre_hooks.values()
        if not hooks or not all(map(is_pruning, hooks)):
            return []
        pruned, buffers = {hook._tensor_name for hook in hooks}, self._buffers
        names = names_of(self.mode, self.num_layers, bool(self.bias), bool(self.bidirectional))
        masks = [buffers.get(f"{name}_mask") if name in pruned else None for name in names]
        return [
            mask if mask is not None and weight.dim() == 2 and mask.shape == weight.shape else None
            for mask, weight in zip(masks, weights, strict=True)
        ]

    def _run(
        self, x: Tensor, state: Tensor | None, lengths: Tensor | None, weights: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Run all layers at once; one after the other if there is dropout between them."""
        flags = bool(self.bias), bool(self.bidirectional)
        masks = self._masks(weights)
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


def joined(hx: Any) -> Tensor:
    """Return initial states as the kernels take them: ``[h, c]`` of an LSTM."""
    state: Tensor = torch.cat(hx, -1) if isinstance(hx, tuple) else hx
    return state
