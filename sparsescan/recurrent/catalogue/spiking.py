"""Spiking neurons. They have no weights, so there are as many inputs as units."""

from __future__ import annotations

import math

from ...graph.functions import absolute, hardtanh, log, surrogate
from ..cell import Cell
from ..definition import Choice, Constant, Scalar


def atan(alpha: float = 2.0):
    """Return a step function whose derivative is that of ``arctan(π α u / 2) / π``.

    Fang et al., 2021, arXiv 2007.05785.
    """
    return surrogate(lambda u: u > 0, lambda u: alpha / 2 / (1 + (math.pi / 2 * alpha * u) ** 2))


def fast_sigmoid(slope: float = 25.0):
    """Return a step function whose derivative is that of ``u / (1 + slope |u|)``.

    Zenke and Ganguli, 2018, arXiv 1705.11146.
    """
    return surrogate(lambda u: u > 0, lambda u: 1 / (1 + slope * absolute(u)) ** 2)


class Spiking(Cell):
    """Base of neurons that spike where a potential is above a threshold.

    Parameters have snnTorch's names, and are trained. Decay rates are clipped to [0, 1]. A derived
    class may make them vectors: ``beta = Vector(initial=0.9)``.
    """

    beta = Scalar(initial=0.9)
    threshold = Scalar(initial=1.0)
    graded_spikes_factor = Constant(1.0)
    reset_mechanism = Choice("subtract", "zero", "none")
    spike_grad = Choice("atan", "fast_sigmoid")
    alpha_of_atan = Constant(2.0)
    slope = Constant(25.0)

    def spike(self, u):
        """Return 1 where the potential is above the threshold, 0 elsewhere."""
        kind = atan(self.alpha_of_atan) if self.spike_grad == "atan" else fast_sigmoid(self.slope)
        return kind(u - self.threshold)

    def decay(self, rate):
        """Return a rate clipped to [0, 1]."""
        return hardtanh(rate, 0, 1)


class LIF(Spiking):
    """Base of leaky neurons that integrate and fire."""

    reset_delay = Constant(True)

    def fire(self, u, r):
        """Return the spikes, and the potential with which the next step begins."""
        s = self.spike(u)
        if not self.reset_delay and self.reset_mechanism != "none":
            u = u - (s - r) * (u if self.reset_mechanism == "zero" else self.threshold)
        return s * self.graded_spikes_factor, u


class Leaky(LIF):
    """Leaky integrate-and-fire neuron (Eshraghian et al., 2023, arXiv 2109.12894).

    ::

        r  = 1 where u > ϑ, else 0                not differentiated
        u' = β u + x - r ϑ                        or β (1 - r) u + x, to reset to zero
        s' = 1 where u' > ϑ, else 0               differentiated as `spike_grad`

    The state is ``[s, u]``. No step reads the previous spikes ``s``. With ``reset_delay=False`` the
    potential is reset in the step of the spike, and gradients flow through the reset.
    """

    def step(self, x, s, u):
        r = u > self.threshold
        kept = (1 - r) * u if self.reset_mechanism == "zero" else u
        u = self.decay(self.beta) * kept + x
        if self.reset_mechanism == "subtract":
            u = u - r * self.threshold
        return self.fire(u, r)


class Synaptic(LIF):
    """Leaky neuron with a synaptic current (Eshraghian et al., 2023, arXiv 2109.12894).

    ::

        r  = 1 where u > ϑ, else 0                not differentiated
        i' = α i + x
        u' = β u + i' - r ϑ                       or (1 - r) (β u + i'), to reset to zero
        s' = 1 where u' > ϑ, else 0               differentiated as `spike_grad`

    The state is ``[s, i, u]``. No step reads the previous spikes ``s``.
    """

    alpha = Scalar(initial=0.9)

    def step(self, x, s, i, u):
        r = u > self.threshold
        i = self.decay(self.alpha) * i + x
        u = self.decay(self.beta) * u + i
        if self.reset_mechanism == "subtract":
            u = u - r * self.threshold
        if self.reset_mechanism == "zero":
            u = (1 - r) * u
        s, u = self.fire(u, r)
        return s, i, u


class Alpha(Spiking):
    """Neuron whose potential is an alpha function (Eshraghian et al., 2023, arXiv 2109.12894).

    ::

        r  = 1 where u > ϑ, else 0                not differentiated
        e' = (1 - r) (α e + x)
        i' = (1 - r) (β i - x)
        u' = (1 - r) τ (e' + i')                  τ = log α / (log β - log α) + 1
        s' = 1 where u' > ϑ, else 0               differentiated as `spike_grad`

    The state is ``[s, e, i, u]``. No step reads the previous spikes ``s``. α must be greater than
    β. With ``reset_mechanism="subtract"``, as in snnTorch, ``e' = α e + x - r ϑ``,
    ``i' = (1 - r) (β i - x)`` and ``u' = τ (α e + β i) + r i``.
    """

    alpha = Scalar(initial=0.9)
    beta = Scalar(initial=0.8)
    reset_mechanism = Choice("zero", "subtract", "none")

    def step(self, x, s, e, i, u):
        r = u > self.threshold
        alpha, beta = self.decay(self.alpha), self.decay(self.beta)
        tau = log(alpha) / (log(beta) - log(alpha)) + 1
        excited, inhibited = alpha * e + x, beta * i - x
        u = tau * (excited + inhibited)
        if self.reset_mechanism == "subtract":
            excited, inhibited, u = excited - r * self.threshold, (1 - r) * inhibited, u + r * i
        if self.reset_mechanism == "zero":
            excited, inhibited, u = (1 - r) * excited, (1 - r) * inhibited, (1 - r) * u
        return self.spike(u) * self.graded_spikes_factor, excited, inhibited, u
