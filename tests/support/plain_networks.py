"""Networks of any cells as plain loops of PyTorch's operations, with states for all to see."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from cell_oracle import Reference
from torch import Tensor

from sparsescan.recurrent.definition import further_of

_NAMES = "weight_ih", "weight_hh", "bias_ih", "bias_hh"


def _step(kind: Any, x: Tensor, states: Sequence[Tensor], params: Mapping[str, Tensor]) -> Any:
    """Return the new states of a cell, by the equations of PyTorch's documentation or its class."""
    if not isinstance(kind, str):
        return [each[0] for each in Reference(kind).unroll(params, x[None], states)]
    w_ih, w_hh, b_ih, b_hh = map(params.__getitem__, _NAMES)
    h = states[0]
    given, own = x @ w_ih.T + b_ih, h @ w_hh.T + b_hh
    if kind == "RNN":
        return [torch.tanh(given + own)]
    if kind == "GRU":
        r, z, n = given.chunk(3, -1)
        r_own, z_own, n_own = own.chunk(3, -1)
        r, z = torch.sigmoid(r + r_own), torch.sigmoid(z + z_own)
        n = torch.tanh(n + r * n_own)
        return [(1 - z) * n + z * h]
    i, f, g, o = (given + own).chunk(4, -1)
    c = torch.sigmoid(f) * states[1] + torch.sigmoid(i) * torch.tanh(g)
    return [torch.sigmoid(o) * torch.tanh(c), c]


def plain_run(
    kind: Any,
    params: Mapping[str, Tensor],
    x: Tensor,
    state: Tensor,
    lengths: Tensor,
    resets: Tensor | None = None,
    reset_states: Tensor | None = None,
    cut: int = 0,
    *,
    all_layers: bool = False,
) -> tuple[list[Tensor], Tensor]:
    """Return the outputs of each state, and the last states, of a network of one or two directions.

    Its cells are "RNN", "GRU", "LSTM", or of a class. Further inputs are among the parameters.

    Outputs are those of the last layer, or those of the directions of all layers in one more axis.

    States before step `cut` are constants, in a network of one direction. Resets set states to
    zeros unless others are given.
    """
    is_named = isinstance(kind, str)
    count = 1 + (kind == "LSTM") if is_named else len(inspect.signature(kind.step).parameters) - 2
    further = {} if is_named else further_of(kind)
    others = torch.zeros_like(state) if reset_states is None else reset_states
    bidirectional = any(name.endswith("_reverse") for name in params)
    layers = len(state) // (1 + bidirectional)
    steps, lasts, every = len(x), [], []
    outputs: list[Tensor] = []
    for layer in range(layers):
        found = []
        for back in range(1 + bidirectional):
            end = f"_l{layer}{'_reverse' * back}"
            own = {
                name.removesuffix(end): each for name, each in params.items() if name.endswith(end)
            }
            k = layer * (1 + bidirectional) + back
            states, set_by_resets = (list(each[k].chunk(count, -1)) for each in (state, others))
            rows: list[Any] = [None] * steps
            for t in range(steps)[:: -1 if back else 1]:
                if cut and t == cut:
                    states = [each.detach() for each in states]
                if resets is not None:
                    anew = resets[t] & (t < lengths)
                    if back:
                        anew = resets[t + 1] & (t + 1 < lengths) if t + 1 < steps else anew & False
                    pairs = zip(set_by_resets, states, strict=True)
                    states = [torch.where(anew[:, None], *both) for both in pairs]
                has = (t < lengths)[:, None]
                now = {name: own[name][t : t + 1] for name in further}
                new = _step(kind, x[t], states, own | now)
                states = [torch.where(has, *both) for both in zip(new, states, strict=True)]
                rows[t] = [torch.where(has, each, 0) for each in states]
            found.append(rows)
            every.append(torch.stack([torch.stack(row) for row in rows]))
            lasts.append(torch.cat(states, -1))
        outputs = [
            torch.stack([torch.cat([rows[t][n] for rows in found], -1) for t in range(steps)])
            for n in range(count)
        ]
        x = outputs[0]
    if all_layers:
        outputs = list(torch.stack(every, -2).unbind(1))
    return outputs, torch.stack(lasts)


def truncated_grads(
    kind: str,
    params: Mapping[str, Tensor],
    x: Tensor,
    state: Tensor,
    lengths: Tensor,
    resets: Tensor | None,
    truncate: int,
    above: Tensor,
    carry: Tensor,
    reset_states: Tensor | None = None,
    *,
    all_layers: bool = False,
) -> list[Tensor]:
    """Return gradients that flow at most to the segment before.

    They are those in input, state, parameters and, if given, states that resets set. The gradients
    in all outputs are `above`, those in the last states `carry`.
    """
    leaves = [x, state, *params.values(), *([] if reset_states is None else [reset_states])]
    totals = [torch.zeros_like(each) for each in leaves]
    lasts = torch.clamp(-(-lengths // truncate) - 1, min=0)
    for segment in range(-(-len(x) // truncate)):
        begin = segment * truncate
        outputs, last = plain_run(
            *(kind, params, x, state, lengths, resets, reset_states),
            cut=max(0, begin - truncate),
            all_layers=all_layers,
        )
        own = slice(begin, begin + truncate)
        loss = (torch.cat(outputs, -1)[own] * above[own]).sum()
        loss = loss + (last * carry * (lasts == segment)[:, None]).sum()
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        for total, grad in zip(totals, grads, strict=True):
            if grad is not None:
                total += grad
    return totals
