"""The audio of the GRU: clips, their coefficients, and the notes of a sound font."""

from __future__ import annotations

import importlib.util
import struct
import wave
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from . import audio

# The sizes of the paper's Table 3.
SHAPES = {"S": (259, 38), "M": (517, 24), "L": (1034, 12)}

needs_librosa = pytest.mark.skipif(
    importlib.util.find_spec("librosa") is None, reason="librosa is not installed"
)


def write(path: Path, samples: np.ndarray, rate: int = audio.RATE) -> None:
    """Write a WAV file of 16 bits from samples ``(channels, n)``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(len(samples))
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples.T * 2**15).astype("<i2").tobytes())


def noise(rng: np.random.Generator) -> np.ndarray:
    return rng.uniform(-0.9, 0.9, (2, audio.LENGTH)).astype(np.float32)


@needs_librosa
def test_a_folder_gives_the_sizes_of_table_3(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("vio/[vio]a.wav", "vio/b.wav", "cel/c.wav"):
        write(tmp_path / name, noise(rng))
    (tmp_path / "README.txt").touch()
    (tmp_path / "empty").mkdir()
    recordings = audio.load(tmp_path)
    assert recordings.name == f"recordings in {tmp_path.name}"
    assert recordings.classes == ("cel", "vio")
    np.testing.assert_array_equal(recordings.labels, [0, 1, 1])
    for name, (frames, coefficients) in SHAPES.items():
        assert audio.SETS[name].shape == (frames, coefficients)
        x = audio.features(recordings, audio.SETS[name])
        assert x.shape == (3, frames, coefficients)
        assert x.dtype == np.float32
        np.testing.assert_allclose(x.mean(axis=1), 0, atol=1e-5)
        np.testing.assert_allclose(x.std(axis=1), 1, rtol=1e-5)
    assert audio.load(tmp_path, per_class=1).labels.tolist() == [0, 1]


@needs_librosa
@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(list(SHAPES)))
def test_loudness_does_not_matter_and_each_channel_has_its_half(seed: int, name: str) -> None:
    rng = np.random.default_rng(seed)
    # Loud at times, so that no coefficient is the same in all frames.
    clip = noise(rng) * np.repeat(rng.uniform(0.1, 1, 100), audio.LENGTH // 100).astype(np.float32)
    features = audio.mfcc(clip, audio.SETS[name])
    np.testing.assert_allclose(audio.mfcc(clip / 4, audio.SETS[name]), features, atol=1e-3)
    left, right = np.split(features, 2, axis=1)
    swapped = audio.mfcc(clip[::-1], audio.SETS[name])
    np.testing.assert_allclose(swapped, np.hstack([right, left]), atol=1e-5)


@needs_librosa
def test_silence_has_no_features() -> None:
    silence = np.zeros((2, audio.LENGTH), np.float32)
    np.testing.assert_allclose(audio.mfcc(silence, audio.SETS["S"]), 0, atol=1e-4)


def test_files_are_brought_to_one_form(tmp_path: Path) -> None:
    pytest.importorskip("soundfile")
    seconds = np.arange(audio.LENGTH) / audio.RATE
    tone = 0.5 * np.sin(2 * np.pi * 440 * seconds)[None]
    half = 0.5 * np.sin(2 * np.pi * 440 * 2 * seconds[: audio.LENGTH // 2])[None]
    short, both = tone[:, :1000], np.vstack([tone, -tone])
    for name, samples, rate in (
        ("long", np.hstack([tone, tone]), audio.RATE),
        ("rate", half, audio.RATE // 2),
        ("short", short, audio.RATE),
        ("stereo", both, audio.RATE),
    ):
        write(tmp_path / "tone" / f"{name}.wav", samples, rate)
    recordings = audio.load(tmp_path)
    long, rate, padded, stereo = (recordings.read(k) for k in range(4))
    for clip in (long, rate, padded, stereo):
        assert clip.shape == (2, audio.LENGTH)
        assert clip.dtype == np.float32
    for clip in (long, stereo):
        np.testing.assert_allclose(clip[0], tone[0], atol=1e-4)
    np.testing.assert_allclose(stereo[1], -tone[0], atol=1e-4)
    np.testing.assert_array_equal(long[0], long[1])
    np.testing.assert_allclose(rate[:, 1000:-1000], long[:, 1000:-1000], atol=1e-2)
    np.testing.assert_allclose(padded[:, :1000], long[:, :1000], atol=1e-4)
    np.testing.assert_array_equal(padded[:, 1000:], 0)


def test_a_folder_without_recordings_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "cel").mkdir()
    with pytest.raises(FileNotFoundError, match="one for each instrument"):
        audio.load(tmp_path)


# -- Sound fonts ----------------------------------------------------------------------------------


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack("<4sI", name, len(data)) + data + b"\0" * (len(data) % 2)


def sound_font(notes: list[tuple[bytes, int, np.ndarray]]) -> bytes:
    """Return a font of notes, each a name, a rate and samples of 16 bits, with 46 zeros behind."""
    samples, headers = b"", b""
    for name, rate, note in notes:
        start = len(samples) // 2
        samples += note.astype("<i2").tobytes() + bytes(92)
        headers += struct.pack(
            "<20s5IBbHH", name, start, start + len(note), 0, 0, rate, 60, 0, 0, 1
        )
    parts = [
        chunk(b"LIST", b"INFO" + chunk(b"INAM", b"odd")),
        chunk(b"LIST", b"sdta" + chunk(b"smpl", samples)),
        chunk(b"LIST", b"pdta" + chunk(b"phdr", bytes(38)) + chunk(b"shdr", headers + bytes(46))),
    ]
    return chunk(b"RIFF", b"sfbk" + b"".join(parts))


def test_notes_are_read_from_a_sound_font() -> None:
    rng = np.random.default_rng(0)

    def note(length: int) -> np.ndarray:
        return rng.integers(-(2**15), 2**15, length)

    flute, low, loop, drum = note(20_000), note(10_000), note(100), note(20_000)
    font = sound_font(
        [
            (b"FluteA4", audio.RATE, flute),
            (b"FluteC4", audio.RATE // 2, low),
            (b"FluteE4", audio.RATE, loop),
            (b"Drum", audio.RATE, drum),
        ]
    )
    notes = audio.instruments(font)
    assert {name: len(notes) for name, notes in notes.items() if notes} == {"flute": 2}
    np.testing.assert_array_equal(notes["flute"][0] * 2**15, flute)
    assert len(notes["flute"][1]) == 2 * len(low)


@pytest.mark.skipif(
    importlib.util.find_spec("pretty_midi") is None, reason="pretty_midi is not installed"
)
def test_notes_stand_in_for_irmas() -> None:
    recordings = audio.load(None, per_class=2)
    assert len(recordings.classes) == 9
    np.testing.assert_array_equal(np.bincount(recordings.labels), [2] * 9)
    clips = [recordings.read(k) for k in range(len(recordings.labels))]
    np.testing.assert_array_equal(clips[3], recordings.read(3))
    for k, clip in enumerate(clips):
        assert clip.shape == (2, audio.LENGTH)
        assert clip.dtype == np.float32
        # Sound from beginning to end, of both channels, and none twice.
        loud = np.abs(clip.reshape(2, 30, -1)).max(axis=2)
        assert np.all((loud > 0.001) & (loud < 1.2))
        assert not any(np.array_equal(clip, other) for other in clips[:k])
