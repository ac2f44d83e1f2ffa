"""
A Kalman smoother by two affine scans
=====================================

A Kalman filter and the Rauch–Tung–Striebel smoother behind it are linear recurrences whose matrices
change from step to step. Once the gains are known, each is one call of
:func:`sparsescan.affine_scan`, for all sequences of a batch.

Here a photograph has lost two of three colours at each pixel, at random, and the third has noise.
Each row is a sequence of 640 steps, whose state is the true colour. The smoother recovers it.
"""

import matplotlib.pyplot as plt
import numpy as np
from scipy.linalg import solveh_banded
from sklearn.datasets import load_sample_image

import sparsescan

photo = load_sample_image("flower.jpg")[:300] / 255
truth = photo.transpose(1, 0, 2)  # (steps, rows, colours)
T, B, _ = truth.shape

rng = np.random.default_rng(0)
kept = rng.integers(3, size=(T, B))  # the colour that is observed
error = 0.05
observed = np.take_along_axis(truth, kept[..., None], axis=2)
observed += error * rng.standard_normal(observed.shape)
H = np.eye(3)[kept]  # (T, B, 3): an observation is H_t x_t

# %%
# The model
# ---------
# Along a row the colour is a random walk, :math:`x_t = x_{t-1} + w_t`, whose three parts are
# correlated, with a covariance ``Q`` that is taken from another photograph. An observation is
# :math:`y_t = H_t x_t + v_t`, and ``H_t`` differs from pixel to pixel.

other = load_sample_image("china.jpg") / 255
Q = np.cov(np.diff(other, axis=1).reshape(-1, 3).T)
prior_mean, prior = np.full(3, 0.5), 0.1 * np.eye(3)
print("correlation of neighbouring colours:", np.corrcoef(other.reshape(-1, 3).T)[0, 1:].round(2))

# %%
# Gains
# -----
# Covariances, and the gains that follow from them, do not depend on the observations. They take a
# loop over time, for all rows at once.

gain, filtered, predicted = np.empty((T, B, 3)), np.empty((T, B, 3, 3)), np.empty((T, B, 3, 3))
for t in range(T):
    predicted[t] = filtered[t - 1] + Q if t else prior
    seen = predicted[t] @ H[t, :, :, None]  # the covariance of state and observation
    gain[t] = (seen / (H[t, :, None] @ seen + error**2))[..., 0]
    filtered[t] = predicted[t] - gain[t][..., None] * seen.swapaxes(1, 2)

# %%
# The filter
# ----------
# Its mean is the prediction, corrected by the gain times the prediction error,
#
# .. math:: m_t = (I - K_t H_t)\, m_{t-1} + K_t y_t,
#
# an affine scan in the order of time.

matrices = np.eye(3) - gain[..., None] * H[:, :, None]
mean = sparsescan.affine_scan(matrices, gain * observed, initial=prior_mean)

# %%
# The smoother
# ------------
# It goes back in time, and corrects each mean by the ones after it,
#
# .. math:: s_t = m_t + G_t\, (s_{t+1} - m_t), \quad G_t = P_t\, (P_t + Q)^{-1},
#
# an affine scan of reversed arrays.

G = np.linalg.solve(predicted[1:], filtered[:-1]).swapaxes(2, 3)
offsets = ((np.eye(3) - G) @ mean[:-1, ..., None])[..., 0]
smooth = np.empty_like(mean)
smooth[-1] = mean[-1]
smooth[-2::-1] = sparsescan.affine_scan(G[::-1], offsets[::-1], initial=mean[-1])

# %%
# Comparison with least squares
# -----------------------------
# Smoothed means also solve a least-squares problem in all states of a row at once. Its normal
# equations are banded, and SciPy solves them for one row.


def by_least_squares(row):
    """Return the smoothed means of a row."""
    band, right = np.zeros((6, 3 * T)), np.zeros(3 * T)

    def add(block, first):
        for i, j in zip(*np.tril_indices(len(block)), strict=True):
            band[i - j, first + j] += block[i, j]

    walk = np.hstack([-np.eye(3), np.eye(3)])
    add(np.linalg.inv(prior), 0)
    right[:3] = np.linalg.inv(prior) @ prior_mean
    for t in range(T):
        add(np.outer(H[t, row], H[t, row]) / error**2, 3 * t)
        right[3 * t : 3 * t + 3] += H[t, row] * observed[t, row] / error**2
        if t:
            add(walk.T @ np.linalg.inv(Q) @ walk, 3 * t - 3)
    return solveh_banded(band, right, lower=True).reshape(T, 3)


difference = np.abs(smooth[:, 150] - by_least_squares(150)).max()
print(f"largest difference: {difference:.1e}")
assert difference < 1e-9

# %%
# For comparison, each colour can be interpolated along the row separately. That leaves the noise,
# and does not use the correlation between colours.

interpolated = np.empty_like(truth)
for row in range(B):
    for colour in range(3):
        (at,) = np.nonzero(kept[:, row] == colour)
        interpolated[:, row, colour] = np.interp(np.arange(T), at, observed[at, row, 0])

pictures = {
    "observed": H * observed,
    "interpolated": interpolated,
    "filter": mean,
    "smoother": smooth,
}
errors = {name: np.sqrt(np.mean((each - truth) ** 2)) for name, each in pictures.items()}
assert errors["smoother"] < errors["filter"]
assert errors["smoother"] < errors["interpolated"]

fig, panels = plt.subplots(2, 2, figsize=(9, 6.4), layout="constrained")
for axes, (name, picture) in zip(panels.flat, pictures.items(), strict=True):
    axes.imshow(picture.transpose(1, 0, 2)[60:280, 180:500].clip(0, 1))
    axes.set_title(f"{name}, error {errors[name]:.3f}")
    axes.set_axis_off()
plt.show()
