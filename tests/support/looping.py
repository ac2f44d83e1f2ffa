"""Modules that loop in Python, as people write them, and those whose loop no kernel may run."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

BATCH, INPUTS, UNITS, MOST = 2, 3, 4, 64
Given = tuple[Any, ...]


def sequence(steps: int) -> Given:
    """Return an input of so many steps."""
    return (torch.randn(steps, BATCH, INPUTS),)


def samples_first(steps: int) -> Given:
    """Return an input whose second axis has the steps."""
    return (torch.randn(BATCH, steps, INPUTS),)


def masked(steps: int) -> Given:
    """Return an input and a mask."""
    return torch.randn(steps, BATCH, INPUTS), torch.rand(steps, BATCH) > 0.3


class Gru(nn.Module):
    """A GRU cell and a head."""

    given = staticmethod(sequence)

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(INPUTS, UNITS), nn.Linear(UNITS, 2)

    def begin(self, x: Tensor) -> Tensor:
        return torch.zeros(x.shape[1], UNITS)


class ListAndStack(Gru):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, states = self.begin(x), []
        for t in range(x.size(0)):
            h = self.cell(x[t], h)
            states.append(h)
        return torch.stack(states), h


class Iterated(Gru):
    def forward(self, x: Tensor) -> Tensor:
        h, states = None, []
        for row in x:
            h = self.cell(row, h)
            states.append(h)
        return torch.stack(states, 1)


class Unbound(Gru):
    given = staticmethod(samples_first)

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        h, states = None, []
        for _, row in enumerate(x.unbind(1)):
            h = self.cell(row, h)
            states.append(h.unsqueeze(1))
        return torch.cat(states, 1), h


class Chunks(Gru):
    given = staticmethod(samples_first)

    def forward(self, x: Tensor) -> Tensor:
        h, states = torch.zeros(x.shape[0], UNITS), []
        for row in x.chunk(x.shape[1], 1):
            h = self.cell(row.squeeze(1), h)
            states.append(self.head(h))
        return torch.stack(states, -1)


class While(Gru):
    def forward(self, x: Tensor) -> Tensor:
        h, t, states = self.begin(x), 0, []
        while t < len(x):
            h = self.cell(x[t], h)
            states += [h]
            t += 1
        return torch.stack(states)


class HeadAfter(Gru):
    def forward(self, x: Tensor) -> Tensor:
        h = self.begin(x)
        for t in range(x.shape[0]):
            h = self.cell(x[t], h)
        return functional.log_softmax(self.head(h), -1)


class HeadsAfter(Gru):
    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        h, states = self.begin(x), []
        for t in range(x.shape[0]):
            h = self.cell(x[t], h)
            states.append(h)
        return torch.stack([self.head(each) for each in states]), sum(states)


class FirstAndLast(Gru):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h, states = self.begin(x), []
        for t in range(x.shape[0]):
            h = self.cell(x[t], h)
            states.append(h)
        out = torch.stack(states, 1)
        return out, states[0], out[:, -1], out[:, -1:]


class Filled(Gru):
    given = staticmethod(samples_first)

    def forward(self, x: Tensor) -> Tensor:
        out, h = torch.zeros(x.size(0), x.size(1), UNITS), torch.zeros(x.size(0), UNITS)
        for t in range(x.size(1)):
            h = self.cell(x[:, t, :], h)
            out[:, t] = h
        return self.head(out)


class FilledEmpty(Gru):
    def forward(self, x: Tensor) -> Tensor:
        out, h = torch.empty(x.size(0), x.size(1), 2), self.begin(x)
        for t in range(x.size(0)):
            h = self.cell(x[t], h)
            out[t] = self.head(h)
        return out.mean(0)


class Learned(Gru):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(1, UNITS))

    def forward(self, x: Tensor) -> Tensor:
        h, states = self.first.expand(x.shape[1], -1), []
        for t in range(x.shape[0]):
            h = self.cell(x[t], h)
            states.append(h)
        return torch.stack(states).mean(0)


class Masked(Gru):
    given = staticmethod(masked)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h, states = self.begin(x), []
        for t in range(x.shape[0]):
            m = mask[t].unsqueeze(-1)
            h = torch.where(m, self.cell(x[t], h), h)
            states.append(h * m)
        return torch.stack(states)


class MaskedByProducts(Gru):
    given = staticmethod(masked)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h, states = self.begin(x), []
        for t in range(x.shape[0]):
            m = mask[t].to(x.dtype)[:, None]
            h = m * self.cell(x[t], h) + (1 - m) * h
            states.append(h)
        return torch.stack(states).sum(0)


class Loss(Gru):
    @staticmethod
    def given(steps: int) -> Given:
        return *sequence(steps), torch.randn(steps, BATCH, 2)

    def forward(self, x: Tensor, target: Tensor) -> Any:
        h, loss = self.begin(x), 0.0
        for t in range(x.shape[0]):
            h = self.cell(x[t], h)
            loss = loss + functional.mse_loss(self.head(h), target[t])
        return loss / x.shape[0]


class Windows(Gru):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(2 * INPUTS, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.begin(x) + self.cell.bias_hh[:UNITS]
        states = [h]
        for t in range(1, x.shape[0]):
            h = self.cell(torch.cat([x[t], x[t - 1]], -1), h)
            states.append(h)
        return torch.stack(states)


class WeightsOfSteps(Gru):
    def __init__(self) -> None:
        super().__init__()
        self.offsets = nn.Parameter(torch.randn(MOST, UNITS))

    def forward(self, x: Tensor) -> Tensor:
        h, states = self.begin(x), []
        for t in range(x.shape[0]):
            h = self.cell(x[t], h) + self.offsets[t]
            states.append(h)
        return torch.stack(states)


class Lstm(nn.Module):
    given = staticmethod(sequence)

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(INPUTS, UNITS), nn.Linear(UNITS, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h = torch.zeros(x.size(1), UNITS)
        c, outputs = torch.zeros_like(h), []
        for t in range(x.shape[0]):
            h, c = self.cell(x[t], (h, c))
            outputs.append(self.head(h))
        return torch.stack(outputs), (h, c)


class Gates(nn.Module):
    given = staticmethod(sequence)

    def __init__(self) -> None:
        super().__init__()
        self.x, self.h = nn.Linear(INPUTS, 3 * UNITS), nn.Linear(UNITS, 3 * UNITS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h, states, products = x.new_zeros(x.shape[1], UNITS), [], self.x(x)
        for t in range(len(x)):
            a, b = products[t].chunk(3, -1), self.h(h).chunk(3, -1)
            r, z = torch.sigmoid(a[0] + b[0]), torch.sigmoid(a[1] + b[1])
            h = (1 - z) * torch.tanh(a[2] + r * b[2]) + z * h
            states.append(h)
        return torch.stack(states, 0)


class Layers(nn.Module):
    given = staticmethod(sequence)

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.GRUCell(INPUTS, UNITS), nn.GRUCell(UNITS, UNITS)])


class LayersInTime(Layers):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        states, outputs = [torch.zeros(x.shape[1], UNITS) for _ in self.cells], []
        for t in range(x.shape[0]):
            y = x[t]
            for k, cell in enumerate(self.cells):
                states[k] = y = cell(y, states[k])
            outputs.append(y)
        return torch.stack(outputs), torch.stack(states)


class TimeInLayers(Layers):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        lasts = []
        for cell in self.cells:
            h, states = torch.zeros(x.shape[1], UNITS), []
            for t in range(x.shape[0]):
                h = cell(x[t], h)
                states.append(h)
            x = torch.stack(states)
            lasts.append(h)
        return x, torch.stack(lasts)


class ListsOfLayers(Layers):
    def forward(self, x: Tensor) -> Tensor:
        rows = list(x.unbind(0))
        for cell in self.cells:
            h, states = None, []
            for each in rows:
                h = cell(each, h)
                states.append(h)
            rows = states
        return torch.stack(rows)


class BothDirections(nn.Module):
    given = staticmethod(sequence)

    def __init__(self) -> None:
        super().__init__()
        self.there, self.back = nn.GRUCell(INPUTS, UNITS), nn.GRUCell(INPUTS, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1], UNITS)
        k, there, back = torch.zeros_like(h), [], []
        for t in range(x.shape[0]):
            h = self.there(x[t], h)
            there.append(h)
        for t in range(x.shape[0] - 1, -1, -1):
            k = self.back(x[t], k)
            back.insert(0, k)
        return torch.cat([torch.stack(there), torch.stack(back)], -1)


class BothAtOnce(BothDirections):
    def forward(self, x: Tensor) -> Tensor:
        h = k = x.new_zeros(x.shape[1], UNITS)
        there, back = [], []
        for t in range(x.shape[0]):
            h, k = self.there(x[t], h), self.back(x[-1 - t], k)
            there.append(h)
            back.append(k)
        return torch.cat([torch.stack(there), torch.stack(back[::-1])], -1)


class Decoder(nn.Module):
    @staticmethod
    def given(steps: int) -> Given:
        return torch.randn(BATCH, UNITS), steps

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(UNITS, UNITS), nn.Linear(UNITS, UNITS)

    def forward(self, h: Tensor, steps: int) -> Tensor:
        y, outputs = torch.zeros_like(h), []
        for _ in range(steps):
            h = self.cell(y, h)
            y = self.head(h)
            outputs.append(y)
        return torch.stack(outputs, 1)


class TwoBack(nn.Module):
    given = staticmethod(sequence)

    def __init__(self) -> None:
        super().__init__()
        self.x, self.one = nn.Linear(INPUTS, UNITS), nn.Linear(UNITS, UNITS)
        self.two = nn.Linear(UNITS, UNITS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        zeros = torch.zeros(x.shape[1], UNITS)
        states = [zeros, zeros]
        for t in range(x.shape[0]):
            both = self.one(states[-1]) + self.two(states[-2])
            states.append(torch.tanh(self.x(x[t]) + both))
        return torch.stack(states[2:])


class Residual(nn.Module):
    given = staticmethod(sequence)

    def __init__(self) -> None:
        super().__init__()
        self.x, self.cell = nn.Linear(INPUTS, UNITS), nn.GRUCell(UNITS, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        h, outputs = torch.zeros(x.shape[1], UNITS), []
        for t in range(x.shape[0]):
            e = torch.relu(self.x(x[t]))
            h = self.cell(e, h)
            outputs.append(e + h)
        return torch.stack(outputs)


class Normed(nn.Module):
    given = staticmethod(sequence)

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.norm = nn.GRUCell(INPUTS, UNITS), nn.LayerNorm(UNITS)

    def forward(self, x: Tensor) -> Tensor:
        h, states = torch.zeros(x.shape[1], UNITS), []
        for t in range(x.shape[0]):
            h = self.norm(self.cell(x[t], h))
            states.append(h)
        return torch.stack(states)


class Leaky(nn.Module):
    """Neurons as snnTorch has them, with a smooth reset."""

    given = staticmethod(sequence)

    def __init__(self) -> None:
        super().__init__()
        self.x, self.beta = nn.Linear(INPUTS, UNITS), nn.Parameter(torch.tensor(0.9))

    def forward(self, x: Tensor) -> Tensor:
        v, states = torch.zeros(1), []
        for t in range(x.shape[0]):
            reset = torch.sigmoid(5 * (v - 1.0)).detach()
            v = self.beta.clamp(0, 1) * v + self.x(x[t]) - reset
            states.append(v)
        return torch.stack(states)


class Spike(torch.autograd.Function):
    """A step whose gradient is that of a smooth function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        below: Tensor = above / (1 + x.abs()) ** 2
        return below


class Spiking(Leaky):
    """Neurons as snnTorch has them, with spikes and their surrogate gradient."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        spike: Any = Spike.apply
        v, spikes, states = torch.zeros(x.shape[1], UNITS), [], []
        for t in range(x.shape[0]):
            reset = (v > 1).to(v.dtype).detach()
            v = self.beta.clamp(0, 1) * v + self.x(x[t]) - reset
            spikes.append(spike(v - 1))
            states.append(v)
        return torch.stack(spikes), torch.stack(states)


class SpikingLayers(Leaky):
    """Two layers of neurons, the second of which hears its own spikes."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Linear(2 * UNITS, UNITS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        spike: Any = Spike.apply
        v = w = last = torch.zeros(x.shape[1], UNITS)
        spikes = []
        for t in range(x.shape[0]):
            v = self.beta * v + self.x(2 * x[t])
            first = spike(v - 0.5)
            v = v - 0.5 * first
            w = self.beta * w + self.back(torch.cat([first, last], -1)) - last
            last = spike(w - 0.1)
            spikes.append(last)
        return torch.stack(spikes), w


class Halved(torch.autograd.Function):
    """A product with other gradients than those of products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, share: float) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.share = share
        return x * y

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, Tensor, None]:
        x, y = ctx.saved_tensors
        return above * y * ctx.share, above * x / 8, None


class FunctionsAround(Gru):
    """Functions with gradients of their own before, in and behind a loop."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        product: Any = Halved.apply
        x, h, states = product(x, x.cos(), 0.5), self.begin(x), []
        for t in range(x.shape[0]):
            h = product(self.cell(x[t], h), torch.sigmoid(h), 0.25)
            states.append(h)
        return torch.stack([product(each, 1 + each, 0.75) for each in states]), product(h, h, 0.5)


class LiGru(nn.Module):
    """As speechbrain has it."""

    given = staticmethod(samples_first)

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(INPUTS, 2 * UNITS, bias=False)
        self.u = nn.Linear(UNITS, 2 * UNITS, bias=False)
        self.norm = nn.LayerNorm(2 * UNITS)
        self.register_buffer("h_init", torch.zeros(1, UNITS))

    def cell(self, w: Tensor, h: Tensor) -> Tensor:
        states = []
        for k in range(w.shape[1]):
            at, zt = (w[:, k] + self.u(h)).chunk(2, 1)
            zt = torch.sigmoid(zt)
            h = zt * h + (1 - zt) * torch.relu(at)
            states.append(h)
        return torch.stack(states, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        h: Any = self.h_init
        return self.cell(self.norm(self.w(x)), h.expand(x.shape[0], -1))


# -- Loops that no kernel may run, at least for some lengths ---------------------------------------


class Wild(Gru):
    """A loop whose steps may be anything."""

    def forward(self, x: Tensor) -> Tensor:
        h, states = self.begin(x), list[Tensor]()
        for t in range(x.shape[0]):
            h = self.step(t, x, h, states)
            states.append(h)
        return torch.stack(states)

    def step(self, t: int, x: Tensor, h: Tensor, states: list[Tensor]) -> Tensor:
        raise NotImplementedError


class EachTenth(Wild):
    def step(self, t: int, x: Tensor, h: Tensor, states: list[Tensor]) -> Tensor:
        h = self.cell(x[t], h)
        return h * 0.5 if t % 10 == 9 else h


class EachTenthByANumber(Wild):
    def step(self, t: int, x: Tensor, h: Tensor, states: list[Tensor]) -> Tensor:
        return self.cell(x[t], h) * (0.99999 if t % 10 == 9 else 1.0)


class LateDetach(Wild):
    def step(self, t: int, x: Tensor, h: Tensor, states: list[Tensor]) -> Tensor:
        h = self.cell(x[t], h)
        return h.detach() if t == 11 else h


class PythonsNumbers(Wild):
    def step(self, t: int, x: Tensor, h: Tensor, states: list[Tensor]) -> Tensor:
        h = self.cell(x[t], h)
        return h if random.random() < 0.99 else h * 0.5


class NumPysNumbers(Wild):
    def step(self, t: int, x: Tensor, h: Tensor, states: list[Tensor]) -> Tensor:
        h = self.cell(x[t], h)
        return h if np.random.rand() < 0.99 else h * 0.5  # noqa: NPY002


class OwnNumbers(Wild):
    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)

    def step(self, t: int, x: Tensor, h: Tensor, states: list[Tensor]) -> Tensor:
        h = self.cell(x[t], h)
        return h if self.rng.random() < 0.99 else h * 0.5


class Noise(Wild):
    def step(self, t: int, x: Tensor, h: Tensor, states: list[Tensor]) -> Tensor:
        return self.cell(x[t], h) + 0.1 * torch.randn(UNITS)


class Dropout(Wild):
    def step(self, t: int, x: Tensor, h: Tensor, states: list[Tensor]) -> Tensor:
        return functional.dropout(self.cell(x[t], h), 0.3, self.training)


class Teacher(Wild):
    def step(self, t: int, x: Tensor, h: Tensor, states: list[Tensor]) -> Tensor:
        return self.cell(x[t] if t % 3 else x[0], h)


class EarlyEnd(Gru):
    def forward(self, x: Tensor) -> Tensor:
        h, states = self.begin(x), []
        for t in range(x.shape[0]):
            h = self.cell(x[t], h)
            states.append(h)
            if h.sum() > 0.5:
                break
        return torch.stack(states)


class LastInputStays(Wild):
    def step(self, t: int, x: Tensor, h: Tensor, states: list[Tensor]) -> Tensor:
        return self.cell(x[min(t, 12)], h)


class Attention(Wild):
    def step(self, t: int, x: Tensor, h: Tensor, states: list[Tensor]) -> Tensor:
        h = self.cell(x[t], h)
        return h + torch.stack([*states, h]).mean(0)


class Counter(Wild):
    count = 0

    def step(self, t: int, x: Tensor, h: Tensor, states: list[Tensor]) -> Tensor:
        self.count += 1
        return self.cell(x[t], h) * (1 + 0.01 * (self.count % 7))


class ClassCounter(Wild):
    count = 0

    def step(self, t: int, x: Tensor, h: Tensor, states: list[Tensor]) -> Tensor:
        type(self).count += 1
        return self.cell(x[t], h)


class History(Wild):
    def __init__(self) -> None:
        super().__init__()
        self.history: list[int] = []

    def step(self, t: int, x: Tensor, h: Tensor, states: list[Tensor]) -> Tensor:
        self.history.append(t)
        return self.cell(x[t], h)


class KeepsState(Gru):
    def forward(self, x: Tensor) -> Tensor:
        h, states = getattr(self, "h", None), []
        for t in range(x.shape[0]):
            h = self.cell(x[t], h)
            states.append(h)
        self.h = states[-1].detach()
        return torch.stack(states)


class ChangesBuffer(Wild):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(UNITS))

    def step(self, t: int, x: Tensor, h: Tensor, states: list[Tensor]) -> Tensor:
        mean: Any = self.mean
        h = self.cell(x[t], h)
        with torch.no_grad():
            mean.mul_(0.9).add_(0.1 * h.mean(0))
        return h + mean.clone()


class SetsBuffer(Wild):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(UNITS))

    def step(self, t: int, x: Tensor, h: Tensor, states: list[Tensor]) -> Tensor:
        self.mean: Any = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return self.cell(x[t], h) + self.mean


class BatchNorm(Wild):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(UNITS)

    def step(self, t: int, x: Tensor, h: Tensor, states: list[Tensor]) -> Tensor:
        return self.norm(self.cell(x[t], h))


class Time(Wild):
    def step(self, t: int, x: Tensor, h: Tensor, states: list[Tensor]) -> Tensor:
        return self.cell(x[t] + 0.1 * t, h)


class ShareOfTime(Wild):
    def step(self, t: int, x: Tensor, h: Tensor, states: list[Tensor]) -> Tensor:
        return self.cell(x[t] * (t / x.shape[0]), h)


class Schedule(Wild):
    def __init__(self) -> None:
        super().__init__()
        self.scales = [random.Random(k).random() for k in range(MOST)]

    def step(self, t: int, x: Tensor, h: Tensor, states: list[Tensor]) -> Tensor:
        return self.cell(x[t] * self.scales[t], h)


class Weights(Wild):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList([nn.Parameter(torch.randn(UNITS)) for _ in range(MOST)])

    def step(self, t: int, x: Tensor, h: Tensor, states: list[Tensor]) -> Tensor:
        return self.cell(x[t], h) + self.w[t]


class WeightsInTurn(Wild):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(10, UNITS))

    def step(self, t: int, x: Tensor, h: Tensor, states: list[Tensor]) -> Tensor:
        return self.cell(x[t], h) + self.w[t % 10]


class Prints(Wild):
    def step(self, t: int, x: Tensor, h: Tensor, states: list[Tensor]) -> Tensor:
        print(t)
        return self.cell(x[t], h)


class ChangesInput(Wild):
    def step(self, t: int, x: Tensor, h: Tensor, states: list[Tensor]) -> Tensor:
        with torch.no_grad():
            x.detach()[t].mul_(0.5)
        return self.cell(x[t].detach().clone(), h)


class ReadsNumbers(Wild):
    def step(self, t: int, x: Tensor, h: Tensor, states: list[Tensor]) -> Tensor:
        return self.cell(x[t] * h.mean().item(), h)


class Iterator(Wild):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.cycle([1.0, 0.5, 0.25])

    def step(self, t: int, x: Tensor, h: Tensor, states: list[Tensor]) -> Tensor:
        return self.cell(x[t], h) * next(self.numbers)


class LateFunction(Wild):
    def step(self, t: int, x: Tensor, h: Tensor, states: list[Tensor]) -> Tensor:
        product: Any = Halved.apply
        return product(self.cell(x[t], h), h.cos(), 0.5 if t != 12 else 0.25)


class SometimesNoGradients(Wild):
    def step(self, t: int, x: Tensor, h: Tensor, states: list[Tensor]) -> Tensor:
        with torch.set_grad_enabled(t != 10):
            return self.cell(x[t], h)


def _kinds(*bases: type[nn.Module]) -> list[Any]:
    found = [each for each in globals().values() if isinstance(each, type)]
    return [each for each in found if issubclass(each, bases) and "forward" in dir(each)]


WILD = [each for each in _kinds(Wild) if each is not Wild] + [EarlyEnd, KeepsState]
TAME = [
    each
    for each in _kinds(nn.Module)
    if each not in (*WILD, Wild, Gru, Layers, Tensor) and each.__module__ == __name__
]
# Some of which are right for short loops, or for others than some lengths, are run by kernels then.
SOMETIMES = [EachTenth, EachTenthByANumber, LateDetach, LastInputStays, WeightsInTurn]
