"""The demo learns, both ways alike, and its gradients are those of its loss."""

import numpy as np
import pytest

import sparsescan
from sparsescan.examples import digits

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")
pytest.importorskip("tqdm")

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def model():
    """A tiny model in float64."""
    rng = np.random.default_rng(3)
    model = digits.Model(4, rng, np.float64)
    model.vector += 0.1 * rng.standard_normal(4 * 4 + 3 * 4 + 10 * 5)
    return model


@pytest.fixture
def batch():
    return np.random.default_rng(4).random((3, digits.STEPS)), np.array([7, 0, 2])


def gradients_of(model, batch, schedule):
    """The gradient in the parameters by the scan, and by the loop."""
    model.begin(*batch)
    jacobians = model.jacobians()
    plan = sparsescan.plan([model.cell.pattern] * digits.STEPS, reverse=True, schedule=schedule)
    ways = model.scan_backward(plan, jacobians), model.sequential_backward()
    return [np.concatenate([g.ravel() for g in model.param_grads(way)]) for way in ways]


@pytest.mark.parametrize(
    "schedule",
    ["linear", "blelloch", sparsescan.Schedule.chunked(digits.STEPS, 7)],
    ids=["linear", "blelloch", "chunked"],
)
def test_gradients_are_those_of_the_loss(model, batch, schedule):
    gradients = gradients_of(model, batch, schedule)
    step = 1e-5
    start = model.vector.copy()
    differences = []
    for k in range(len(start)):
        for sign in (1, -1):
            model.vector[:] = start
            model.vector[k] += sign * step
            model.begin(*batch)
        above, below = model.losses[-2:]
        differences.append((above - below) / (2 * step))
    for gradient in gradients:
        # The error of a central difference: step² and eps / step, times values of order one.
        np.testing.assert_allclose(gradient, differences, rtol=1e-6, atol=1e-9)
    assert np.abs(differences).min() > 0


def test_scan_and_loop_agree_in_every_state(model, batch):
    scan, loop = gradients_of(model, batch, "blelloch")
    bound = 64 * digits.STEPS * np.finfo(np.float64).eps
    assert np.abs(scan - loop).max() <= bound * np.abs(loop).max()


def test_the_jacobians_are_those_of_a_step(model, batch):
    model.begin(*batch)
    jacobians = model.jacobians().reshape(digits.STEPS, 3, 4, 4)
    slope = 1 - model.states[9, 1] ** 2
    np.testing.assert_allclose(jacobians[8, 1], model.cell.weight_hh.T @ np.diag(slope), rtol=1e-14)


def test_parameters_are_views_of_the_vector():
    model = digits.Model(3, np.random.default_rng(0))
    parts = [*model.cell.params.values(), *model.readout.params.values()]
    assert sum(part.size for part in parts) == model.vector.size
    model.vector[:] = np.arange(model.vector.size)
    joined = np.concatenate([part.ravel() for part in parts])
    assert joined.tolist() == list(range(model.vector.size))
    np.testing.assert_array_equal(model.readout.weight.shape, (10, 3))


def test_images_for_testing_are_not_for_training():
    data = digits.load_data(seed=0)
    assert (len(data.train_images), len(data.test_images)) == (1437, 360)
    assert (data.train_images.min(), data.train_images.max()) == (0, 1)
    train = {image.tobytes() for image in data.train_images}
    assert not any(image.tobytes() in train for image in data.test_images)


def test_adam_minimises_a_parabola():
    vector = np.array([3.0, -2.0], np.float32)
    adam = digits.Adam(2)
    for _ in range(500):
        adam.update(vector, 2 * vector, 0.05)
    assert np.abs(vector).max() < 1e-2


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    return digits.run(epochs=2, output=folder / "curves"), folder / "curves"


def test_a_short_run_agrees_with_back_propagation(short_run):
    figures, _ = short_run
    # 64 steps, each a sum of 20 products and an addition over the batch.
    assert 0 < figures.gradient_difference < 64 * 20 * np.finfo(np.float32).eps
    np.testing.assert_allclose(figures.scan_losses, figures.sequential_losses, rtol=1e-3)
    assert abs(figures.scan_accuracy - figures.sequential_accuracy) < 0.02


def test_a_short_run_learns(short_run):
    figures, _ = short_run
    assert len(figures.scan_losses) == 2
    assert np.log(10) + 0.3 > figures.scan_losses[0] > figures.scan_losses[1] > 0
    assert figures.scan_accuracy > 0.2  # chance: 0.1


def test_a_short_run_measures(short_run):
    figures, _ = short_run
    assert figures.batches == 2 * (1437 // 16)
    times = [figures.jacobians_ms, figures.scan_ms, figures.sequential_ms]
    assert np.isfinite(times).all()
    assert min(times) > 0
    assert figures.schedule == repr(sparsescan.plan(np.empty((64, 2, 2))).schedule)


def test_a_short_run_draws(short_run):
    _, output = short_run
    assert output.read_bytes().startswith(PNG)
    assert output.stat().st_size > 10_000


def test_options_and_the_printed_table(capsys, tmp_path):
    output = tmp_path / "b.png"
    figures = digits.run(
        hidden=5, epochs=1, batch=100, schedule="blelloch", output=str(output), seed=3
    )
    out, err = capsys.readouterr()
    assert str(figures) in out
    assert f"{figures.scan_ms:.3f}" in str(figures)
    assert f"{figures.sequential_losses[-1]:.4f}" in str(figures)
    assert figures.schedule == "Schedule.blelloch(64)"
    assert figures.batches == 14
    assert str(output) in out
    assert "14/14" in err
    assert output.read_bytes().startswith(PNG)


def test_equal_seeds_give_equal_training(tmp_path):
    runs = [
        digits.run(hidden=3, epochs=1, batch=64, seed=seed, output=tmp_path / "c")
        for seed in (1, 1, 2)
    ]
    assert runs[0].scan_losses == runs[1].scan_losses
    assert runs[0].scan_losses != runs[2].scan_losses
