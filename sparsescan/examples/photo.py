"""Recurrent networks that learn to predict the next pixel of a photograph, each in three ways.

A cell reads the rows of scikit-learn's two photographs, 640 pixels each. From the pixel ``x_t`` and
the one above the next, a linear layer on its state ``h_t`` predicts the change to the next pixel:

    h_t = cell(x_t, h_{t-1}),    d_t = V h_t + c ≈ x_{t+1} - x_t,        t = 1, …, 639,  h_0 = 0.

The loss is the mean of ``(d_t - (x_{t+1} - x_t))²``, relative to that of repeating the last pixel.
The cell is a GRU, or a minimal gated unit, which PyTorch does not have. A network is trained by
sparsescan, by the loop that one would write in NumPy, and by PyTorch: from the same parameters, on
the same rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sparsescan.recurrent import GRU, Cell, Hidden, Input, Recurrent, sigmoid

TEST_ROWS = 150
INPUTS, COLOURS = 6, 3

Array = NDArray[np.floating[Any]]
Params = dict[str, Array]


class MGU(Cell):
    """The minimal gated unit (Zhou et al., 2016)."""

    weight_ih = Input("f", "n")
    weight_hh = Hidden("f", "n")

    def step(self, x: Any, h: Any) -> Any:
        """Return the next state."""
        f = sigmoid(self.weight_ih.f(x) + self.weight_hh.f(h))
        n = np.tanh(self.weight_ih.n(x) + self.weight_hh.n(f * h))
        return h + f * (n - h)


class Rows(NamedTuple):
    """Inputs ``(T, rows, 6)``, and the changes to predict, ``(T, rows, 3)``, of variance 1."""

    inputs: Array
    changes: Array

    def take(self, rows: NDArray[np.int64]) -> Rows:
        """Return some of the rows."""
        return Rows(*(np.ascontiguousarray(array[:, rows]) for array in self))


def load_rows(seed: int) -> tuple[Rows, Rows]:
    """Return the rows of both photographs for training, and those that are kept back."""
    from sklearn.datasets import load_sample_images

    parts = []
    for image in load_sample_images().images:
        pixels = image.astype(np.float32) / 255 - 0.5
        here, above = pixels[1:, :-1], pixels[:-1, 1:]
        parts.append((np.concatenate([here, above], -1), pixels[1:, 1:] - here))
    inputs, changes = (np.concatenate(part).transpose(1, 0, 2) for part in zip(*parts, strict=True))
    every = Rows(inputs, changes / changes.std(dtype=np.float64).astype(np.float32))
    order = np.random.default_rng(seed).permutation(inputs.shape[1])
    return every.take(order[TEST_ROWS:]), every.take(order[:TEST_ROWS])


# -- Three ways to train ---------------------------------------------------------------------------


class Way(Protocol):
    """A network that is trained."""

    def step(self, rows: Rows, rate: float) -> float:
        """Take a training step, and return the loss before it."""


def make_network(cell: str, hidden: int, seed: int | None = None) -> Recurrent:
    """Return a layer of ``"MGU"`` or ``"GRU"``."""
    if cell == "GRU":
        return GRU(INPUTS, hidden, rng=seed)
    return Recurrent(MGU, INPUTS, hidden, rng=seed)


def initial_params(cell: str, hidden: int, seed: int) -> Params:
    """Return parameters to begin with: the cell's, by PyTorch's names, and the linear layer's."""
    params: Params = make_network(cell, hidden, seed).params
    rng = np.random.default_rng([seed, 1])
    bound = 1 / np.sqrt(hidden)
    params["weight"] = rng.uniform(-bound, bound, (COLOURS, hidden)).astype(np.float32)
    params["bias"] = np.zeros(COLOURS, np.float32)
    return {name: param.copy() for name, param in params.items()}


class Adam:
    """Adam (Kingma and Ba, 2015), in place."""

    def __init__(self, params: Params) -> None:
        self._moments = {name: np.zeros((2, *param.shape), "f") for name, param in params.items()}
        self._steps = 0

    def update(self, params: Params, grads: Params, rate: float) -> None:
        """Take a step."""
        self._steps += 1
        first, second = 1 - 0.9**self._steps, 1 - 0.999**self._steps
        for name, param in params.items():
            grad, (mean, square) = grads[name], self._moments[name]
            mean += 0.1 * (grad - mean)
            square += 0.001 * (grad * grad - square)
            param -= rate * (mean / first) / (np.sqrt(square / second) + 1e-8)


class _OnNumPy:
    """A recurrent layer, and in NumPy all that stands around it."""

    def __init__(self, params: Params) -> None:
        self.params = {name: param.copy() for name, param in params.items()}
        self._adam = Adam(params)

    def forward(self, x: Array) -> Array:
        """Return the states of all steps."""
        raise NotImplementedError

    def backward(self, grads: Array) -> Params:
        """Return the gradients in the layer's parameters, from those in all states."""
        raise NotImplementedError

    def step(self, rows: Rows, rate: float) -> float:
        """Take a training step, and return the loss before it."""
        weight = self.params["weight"]
        states = self.forward(rows.inputs)
        errors = states @ weight.T
        errors += self.params["bias"]
        errors -= rows.changes
        loss = float(np.mean(np.square(errors), dtype=np.float64))
        errors *= 2 / errors.size
        flat = errors.reshape(-1, COLOURS)
        grads = self.backward(errors @ weight)
        grads["weight"], grads["bias"] = flat.T @ states.reshape(len(flat), -1), flat.sum(0)
        self._adam.update(self.params, grads, rate)
        return loss


class BySparsescan(_OnNumPy):
    """The layer by its training step, a compiled loop over all steps."""

    def __init__(self, cell: str, params: Params) -> None:
        super().__init__(params)
        network = make_network(cell, params["weight"].shape[1])
        for name in network.params:
            setattr(network, name, self.params[name])
        self._step = network.training_step()

    def forward(self, x: Array) -> Array:
        """Return the states of all steps."""
        return self._step.forward(x)[0]

    def backward(self, grads: Array) -> Params:
        """Return the gradients in the layer's parameters."""
        return self._step.backward(grads, needs_input_grad=False).params


class MGULoop(_OnNumPy):
    """The MGU step by step: products of inputs, and gradients of weights, of all steps at once."""

    def forward(self, x: Array) -> Array:
        """Return the states of all steps."""
        p, (steps, batch, _) = self.params, x.shape
        hidden = p["weight_hh_l0"].shape[1]
        of_inputs = x @ p["weight_ih_l0"].T + (p["bias_ih_l0"] + p["bias_hh_l0"])
        of_f, of_n = of_inputs[..., :hidden], of_inputs[..., hidden:]
        weight = np.ascontiguousarray(p["weight_hh_l0"].T)
        weight_f, weight_n = weight[:, :hidden].copy(), weight[:, hidden:].copy()
        self._x, self._gates = x, np.empty((2, steps, batch, hidden), np.float32)
        self._states = np.zeros((steps + 1, batch, hidden), np.float32)
        h = self._states[0]
        for t in range(steps):
            f = 1 / (1 + np.exp(-(of_f[t] + h @ weight_f)))
            n = np.tanh(of_n[t] + (f * h) @ weight_n)
            h = h + f * (n - h)
            self._gates[:, t], self._states[t + 1] = (f, n), h
        return self._states[1:]

    def backward(self, grads: Array) -> Params:
        """Return the gradients in the MGU's parameters."""
        (f, n), before = self._gates, self._states[:-1]
        steps, batch, hidden = grads.shape
        weight_f, weight_n = np.split(self.params["weight_hh_l0"], 2)
        of_n = f * (1 - n * n)
        of_f, change = f * (1 - f), n - before
        of_sums = np.empty((steps, batch, 2 * hidden), np.float32)
        g = np.zeros((batch, hidden), np.float32)
        for t in range(steps)[::-1]:
            g = g + grads[t]
            in_n = g * of_n[t]
            in_product = in_n @ weight_n
            in_f = (g * change[t] + in_product * before[t]) * of_f[t]
            of_sums[t] = np.concatenate([in_f, in_n], 1)
            g = g * (1 - f[t]) + in_product * f[t] + in_f @ weight_f
        flat = of_sums.reshape(-1, 2 * hidden)
        by_gate = zip(np.split(flat, 2, axis=1), (before, f * before), strict=True)
        return {
            "weight_ih_l0": flat.T @ self._x.reshape(-1, INPUTS),
            "weight_hh_l0": np.concatenate([g.T @ v.reshape(-1, hidden) for g, v in by_gate]),
            "bias_ih_l0": flat.sum(0),
            "bias_hh_l0": flat.sum(0),
        }


class GRULoop(_OnNumPy):
    """The GRU step by step: products of inputs, and gradients of weights, of all steps at once."""

    def forward(self, x: Array) -> Array:
        """Return the states of all steps."""
        p, (steps, batch, _) = self.params, x.shape
        hidden = p["weight_hh_l0"].shape[1]
        of_inputs = x @ p["weight_ih_l0"].T + p["bias_ih_l0"]
        weight, bias = np.ascontiguousarray(p["weight_hh_l0"].T), p["bias_hh_l0"]
        self._x, self._gates = x, np.empty((4, steps, batch, hidden), np.float32)
        self._states = np.zeros((steps + 1, batch, hidden), np.float32)
        two, h = 2 * hidden, self._states[0]
        for t in range(steps):
            of_state = h @ weight + bias
            gates = 1 / (1 + np.exp(-(of_inputs[t, :, :two] + of_state[:, :two])))
            r, z, v = gates[:, :hidden], gates[:, hidden:], of_state[:, two:]
            n = np.tanh(of_inputs[t, :, two:] + r * v)
            h = n + z * (h - n)
            self._gates[:, t], self._states[t + 1] = (r, z, n, v), h
        return self._states[1:]

    def backward(self, grads: Array) -> Params:
        """Return the gradients in the GRU's parameters."""
        weight, (r, z, n, v) = self.params["weight_hh_l0"], self._gates
        steps, batch, hidden = grads.shape
        of_n = (1 - z) * (1 - n * n)
        of_z = (self._states[:-1] - n) * z * (1 - z)
        of_r = v * r * (1 - r)
        of_inputs = np.empty((steps, batch, 3 * hidden), np.float32)
        of_states = np.empty((steps, batch, 3 * hidden), np.float32)
        g = np.zeros((batch, hidden), np.float32)
        for t in range(steps)[::-1]:
            g = g + grads[t]
            in_n = g * of_n[t]
            in_v = in_n * r[t]
            of_states[t] = np.concatenate([in_n * of_r[t], g * of_z[t], in_v], 1)
            of_inputs[t, :, 2 * hidden :] = in_n
            g = g * z[t] + of_states[t] @ weight
        of_inputs[:, :, : 2 * hidden] = of_states[:, :, : 2 * hidden]
        flat_inputs, flat_states = (a.reshape(-1, 3 * hidden) for a in (of_inputs, of_states))
        return {
            "weight_ih_l0": flat_inputs.T @ self._x.reshape(-1, INPUTS),
            "weight_hh_l0": flat_states.T @ self._states[:-1].reshape(-1, hidden),
            "bias_ih_l0": flat_inputs.sum(0),
            "bias_hh_l0": flat_states.sum(0),
        }


LOOPS: dict[str, Callable[[Params], Way]] = {"MGU": MGULoop, "GRU": GRULoop}


class ByPyTorch:
    """The network, in PyTorch: ``torch.nn.GRU``, or a loop over the steps of the MGU."""

    def __init__(self, cell: str, params: Params) -> None:
        import torch

        self._torch = torch
        self.params = {
            name: torch.from_numpy(param.copy()).requires_grad_() for name, param in params.items()
        }
        self._layer: Any = self._mgu
        if cell == "GRU":
            self._gru = torch.nn.GRU(INPUTS, params["weight"].shape[1])
            with torch.no_grad():
                for name, param in self._gru.named_parameters():
                    param.copy_(self.params[name])
                    self.params[name] = param
            self._layer = lambda x: self._gru(x)[0]
        self._adam = torch.optim.Adam(self.params.values(), eps=1e-8)

    def _mgu(self, x: Any) -> Any:
        torch, p = self._torch, self.params
        of_inputs = torch.nn.functional.linear(
            x, p["weight_ih_l0"], p["bias_ih_l0"] + p["bias_hh_l0"]
        )
        weight_f, weight_n = p["weight_hh_l0"].t().chunk(2, 1)
        h, states = x.new_zeros(x.shape[1], len(weight_f)), []
        of_f, of_n = (part.unbind(0) for part in of_inputs.chunk(2, -1))
        for in_f, in_n in zip(of_f, of_n, strict=True):
            f = torch.sigmoid(torch.addmm(in_f, h, weight_f))
            n = torch.tanh(torch.addmm(in_n, f * h, weight_n))
            h = torch.lerp(h, n, f)
            states.append(h)
        return torch.stack(states)

    def step(self, rows: Rows, rate: float) -> float:
        """Take a training step, and return the loss before it."""
        functions = self._torch.nn.functional
        states = self._layer(self._torch.from_numpy(rows.inputs))
        changes = functions.linear(states, self.params["weight"], self.params["bias"])
        loss = functions.mse_loss(changes, self._torch.from_numpy(rows.changes))
        loss.backward()
        self._adam.param_groups[0]["lr"] = rate
        self._adam.step()
        self._adam.zero_grad()
        return float(loss.detach())
