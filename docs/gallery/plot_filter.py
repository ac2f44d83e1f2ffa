"""
A time-varying filter learned by gradient
=========================================

A body of air or metal rings at a frequency, and the ringing dies away. If the body changes, as a
trombone does by its slide, frequency and decay change too. Gradients find both at every moment,
from the input and the recorded sound: ``lfilter`` has gradients in coefficients that change at each
step.
"""

import time

import matplotlib.pyplot as plt
import numpy as np
import torch

from sparsescan.torch import lfilter

# %%
# What is heard
# -------------
# A resonance is a filter of order two: its poles are at a distance `r` from the origin, which says
# how fast it dies away, and at an angle, the frequency. Here the frequency glides and trembles, and
# the resonance is damped for a while. The input is noise, and the recording adds some more.

STEPS, SAMPLES, KNOTS = 4000, 16, 41
t = torch.linspace(0, 1, STEPS)
torch.manual_seed(0)


def resonance(angle, r, x):
    """Return what rings in a body whose angle and damping are those of each step."""
    one = torch.ones_like(angle)
    return lfilter((1 - r)[:, None], torch.stack([one, -2 * r * angle.cos(), r * r], -1), x)


angle = 0.6 + 0.5 * t + 0.08 * torch.sin(25 * t)
r = 0.97 - 0.12 * torch.exp(-(((t - 0.6) / 0.08) ** 2))
x = torch.randn(SAMPLES, STEPS)
heard = resonance(angle, r, x)
heard = heard + 0.02 * torch.randn_like(heard)

# %%
# Learning
# --------
# Angle and damping are lines between 41 knots, which all begin at one frequency. The first steps of
# Adam compare spectra of short pieces, which show even a distant frequency. Later steps compare the
# sound itself.

knots = np.eye(KNOTS)
rows = [np.interp(np.linspace(0, KNOTS - 1, STEPS), np.arange(KNOTS), row) for row in knots]
lines = torch.tensor(np.array(rows).T, dtype=torch.float32)
params = torch.tensor([0.9, 2.0]).repeat(KNOTS, 1).requires_grad_()
window = torch.hann_window(128)


def learned():
    """Return the angle and the damping of each step."""
    return lines @ params[:, 0], torch.sigmoid(lines @ params[:, 1])


def spectrum(sound):
    """Return logarithms of the spectra of short pieces."""
    return torch.stft(sound, 128, 64, window=window, return_complex=True).abs().add(1e-2).log()


optimiser = torch.optim.Adam([params], lr=0.03)
target, errors, start = spectrum(heard), [], time.perf_counter()
for step in range(500):
    optimiser.zero_grad()
    sound = resonance(*learned(), x)
    error = (sound - heard).square().mean() / heard.square().mean()
    loss = (spectrum(sound) - target).square().mean() if step < 200 else error
    loss.backward()
    optimiser.step()
    errors.append(error.item())
spent = time.perf_counter() - start
print(f"500 steps over {SAMPLES} sounds of {STEPS:,} samples in {spent:.1f} s")
print(f"of the sound's power {errors[0]:.0%} were missed at first, {errors[-1]:.1%} at the end")
assert errors[-1] < 0.05

# %%
# What was found
# --------------
# The fit follows the frequency within a few thousandths of a turn. It also follows the damping,
# which a filter with constant coefficients could not do.

fig, axes = plt.subplots(3, 1, figsize=(9, 6), sharex=True, layout="constrained")
axes[0].specgram(heard[0].numpy(), NFFT=128, Fs=2, noverlap=64, cmap="Greys", xextent=(0, STEPS))
axes[0].set(ylabel="cycles per 2 samples", title="One of the sounds, and what was learned")
with torch.no_grad():
    own, own_r = learned()
axes[0].plot(own / np.pi, color="#d55e00", lw=1)
pairs = ((angle, own, "angle of the pole"), (r, own_r, "its distance"))
for ax, (right, found, name) in zip(axes[1:], pairs, strict=True):
    ax.plot(right, color="black", lw=3, alpha=0.3, label="true")
    ax.plot(found, color="#d55e00", lw=1.2, label="learned")
    ax.set_ylabel(name)
    ax.spines[["top", "right"]].set_visible(False)
axes[1].legend(frameon=False)
axes[2].set(xlabel="step", xlim=(0, STEPS))
assert (own - angle).abs().mean() < 0.03
plt.show()
