"""A chain comes back from its file as it was, and a damaged file is called one."""

import contextlib
import os
import time
import tracemalloc

import numpy as np
import pytest
import scipy.sparse as sp
from damaged import arrays_of, bomb, file_of, other_files
from hypothesis import given
from hypothesis import strategies as st

import sparsescan
from sparsescan import BatchedCSR, CSRChain, FileError, InputError, Pattern, load_chain, save_chain
from sparsescan.chains.containers import PeriodicChain
from sparsescan.chains.files import open_chain
from sparsescan.symbolic.pattern import of_mask

DTYPES = (np.float32, np.float64)


def values(rng, shape, dtype):
    """Any bits: NaN with a payload, infinities, -0.0 and subnormal numbers among them."""
    unsigned = np.uint32 if dtype == np.float32 else np.uint64
    return rng.integers(0, np.iinfo(unsigned).max, shape, unsigned, endpoint=True).view(dtype)


def random_pattern(rng, rows, cols):
    kind = rng.integers(4)
    if kind == 0 and rows == cols:
        return sp.csr_array(np.eye(rows))
    density = (0.0, 0.3, 0.3, 1.0)[kind]
    return sp.csr_array(rng.random((rows, cols)) < density)


def random_step(rng, shape, batch, mask):
    dtype = DTYPES[rng.integers(2)]
    form = rng.integers(3 if batch is None else 5)
    if form == 0:
        return sp.csr_array((values(rng, mask.nnz, dtype), mask.indices, mask.indptr), shape)
    if form == 1:
        return sp.csr_matrix((values(rng, mask.nnz, dtype), mask.indices, mask.indptr), shape)
    if form == 2:
        return values(rng, shape, dtype)
    if form == 3:
        data = values(rng, (batch, mask.nnz), dtype)
        return BatchedCSR(data, mask.indices, mask.indptr, shape)
    return values(rng, (batch, *shape), dtype)


@st.composite
def chains(draw):
    """Gradient and Jacobians: a list of anything, a CSRChain or a dense stack."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n = draw(st.integers(0, 8))
    layout = draw(st.sampled_from(["list", "list", "csr_chain", "dense_stack"]))
    batch = draw(st.sampled_from([None, 0, 1, 3]))
    dtype = draw(st.sampled_from(DTYPES))
    size = int(rng.integers(0, 5))
    grad = values(rng, (size,) if batch is None else (batch, size), dtype)
    leading = (n,) if batch is None or rng.integers(2) else (n, batch)
    if layout == "dense_stack":
        return grad, values(rng, (*leading, size, size), dtype)
    if layout == "csr_chain":
        mask = random_pattern(rng, size, size)
        data = values(rng, (*leading, mask.nnz), dtype)
        return grad, CSRChain(data, mask.indices, mask.indptr, (size, size))
    sizes = [size, *rng.integers(0, 5, n).tolist()] if rng.integers(2) else [size] * (n + 1)
    known = {}
    steps = []
    for shape in zip(sizes[1:], sizes[:-1], strict=True):
        if shape not in known or rng.integers(2):
            known[shape] = random_pattern(rng, *shape)
        steps.append(random_step(rng, shape, batch, known[shape]))
    return grad, steps


def assert_same_array(result, expected):
    assert type(result) is np.ndarray
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    assert result.tobytes() == expected.tobytes()


def assert_same(result, expected):
    if isinstance(expected, list):
        assert type(result) is list
        assert len(result) == len(expected)
        for one, other in zip(result, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, np.ndarray):
        assert_same_array(result, expected)
    elif isinstance(expected, tuple):
        assert result[0] is expected[0]
        assert_same_array(result[1], expected[1])
    elif isinstance(expected, PeriodicChain):
        assert result.patterns == expected.patterns
        assert_same(result.values, expected.values)
    else:
        kept = isinstance(expected, (BatchedCSR, CSRChain))
        assert type(result) is (type(expected) if kept else sp.csr_array)
        assert result.shape == expected.shape
        assert_same_array(result.data, expected.data)
        assert np.array_equal(result.indices, expected.indices)
        assert np.array_equal(result.indptr, expected.indptr)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("chains")


@st.composite
def periodic_chains(draw):
    """Gradient and Jacobians of patterns that take turns."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    batch = draw(st.sampled_from([None, 1, 3]))
    steps, period = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    sizes = rng.integers(1, 4, period).tolist()
    shapes = zip([*sizes[1:], sizes[0]], sizes, strict=True)
    patterns = [of_mask(rng.random(shape) < rng.choice([0.6, 1.0])) for shape in shapes]
    own = () if batch is None else (batch,)
    arrays = []
    for j, pattern in enumerate(patterns):
        leading = [(steps, *own), (steps,), ()][rng.integers(3) if j else 0]
        arrays.append(values(rng, (*leading, pattern.nnz), DTYPES[rng.integers(2)]))
    return values(rng, (*own, sizes[0]), np.float64), PeriodicChain(arrays, patterns)


@given(chain=st.one_of(chains(), periodic_chains()))
def test_a_chain_comes_back_bit_for_bit(folder, chain):
    path = folder / "any name"
    save_chain(path, *chain)
    grad, jacobians = load_chain(str(path))
    assert_same_array(grad, chain[0])
    assert_same(jacobians, chain[1])


# Parts


def steps_of(jacobians):
    """Pattern and values of each step, by which parts of chains are compared."""
    if isinstance(jacobians, PeriodicChain):
        for k in range(len(jacobians)):
            step, turn = divmod(k, len(jacobians.patterns))
            array = jacobians.values[turn]
            yield jacobians.patterns[turn], array if array.ndim == 1 else array[step]
    elif isinstance(jacobians, CSRChain):
        yield from ((jacobians.pattern, row) for row in jacobians.data)
    else:
        for step in jacobians:
            if isinstance(step, np.ndarray):
                pattern = Pattern.dense(step.shape[-2:])
                yield pattern, step.reshape(*step.shape[:-2], pattern.nnz)
            else:
                yield Pattern(step.indptr, step.indices, step.shape), step.data


def saved_as(path, how):
    """Write a file again: compressed, big-endian, or in Fortran's order."""
    arrays = arrays_of(path.read_bytes())
    if how == "big-endian":
        arrays = {key: a.astype(a.dtype.newbyteorder(">")) for key, a in arrays.items()}
    if how == "Fortran":
        arrays = {key: np.asfortranarray(a) if a.ndim else a for key, a in arrays.items()}
    with open(path, "wb") as file:
        (np.savez_compressed if how == "compressed" else np.savez)(file, **arrays)


WAYS = ("as saved", "compressed", "big-endian", "Fortran")


@given(chain=st.one_of(chains(), periodic_chains()), how=st.sampled_from(WAYS), data=st.data())
def test_parts_are_those_of_the_whole(folder, chain, how, data):
    path = folder / "parts"
    save_chain(path, *chain)
    if how != "as saved":
        saved_as(path, how)
    whole = list(steps_of(chain[1]))
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    with open_chain(path) as file:
        assert file.n == len(whole)
        assert_same_array(file.grad, chain[0])
        assert file.dtype == np.result_type(chain[0], *(array for _, array in whole))
        part = file.part(start, stop)
        assert type(part) is (list if isinstance(chain[1], PeriodicChain) else type(chain[1]))
        for (pattern, array), (other, expected) in zip(
            steps_of(part), whole[start:stop], strict=True
        ):
            assert pattern is other
            assert_same_array(array, expected)
        shapes = [pattern.shape for pattern, _ in whole[start:stop]]
        assert file.shapes(start, stop).tolist() == list(map(list, shapes))


@pytest.mark.parametrize("layout", ["dense_stack", "csr_chain", "periodic", "list", "patterns"])
@pytest.mark.parametrize("how", WAYS)
def test_a_part_takes_its_own_memory(tmp_path, layout, how):
    n, size = 64, 128
    stack, pattern = np.ones((n, size, size)), Pattern.dense((size, size))  # 8 MB
    flat = stack.reshape(n, -1)
    rng = np.random.default_rng(0)
    chain = {
        "dense_stack": stack,
        "csr_chain": CSRChain(flat, pattern.indices, pattern.indptr, pattern.shape),
        "periodic": PeriodicChain([flat[::2], flat[1::2]], [pattern, pattern]),
        "list": list(stack),
        # Each has one of its own.
        "patterns": [sp.csr_array(step * (rng.random((size, size)) < 0.9)) for step in stack],
    }[layout]
    path = tmp_path / "c.npz"
    save_chain(path, np.ones(size), chain)
    del chain
    saved_as(path, how)
    with open_chain(path) as file:
        file.part(0, 1)
    tracemalloc.start()
    try:
        with open_chain(path) as file:
            part = file.part(40, 48)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(part) == 8
    # Patterns are checked and copied, and a block has 1 MB, twice in another order of bytes.
    own = stack.nbytes / 8 * (4 if layout == "patterns" else 1)
    assert peak < own + (3 << 20) + 300_000


def test_equal_patterns_are_stored_once_and_fast(tmp_path):
    step = sp.csr_array(np.tri(16) - np.tri(16, k=-3))
    jacobians = [step * k for k in range(10_000)]
    start = time.process_time()
    save_chain(tmp_path / "c", np.ones(16), jacobians)
    loaded = load_chain(tmp_path / "c")[1]
    seconds = time.process_time() - start
    assert loaded[9_999].toarray().tolist() == (step * 9_999).toarray().tolist()
    assert np.shares_memory(loaded[0].indices, loaded[9_999].indices)
    # The values, one byte for each step, and little else.
    assert (tmp_path / "c").stat().st_size < 10_000 * (step.nnz * 8 + 1) + 20_000
    assert seconds < 3  # measured: 0.3


def test_a_wrong_chain_writes_nothing(tmp_path):
    with pytest.raises(InputError, match=r"jacobians\[1\] has shape \(2, 2\)"):
        save_chain(tmp_path / "c", np.ones(3), [np.ones((3, 3)), np.ones((2, 2))])
    with pytest.raises(InputError, match=r"grad has shape \(4,\)"):
        save_chain(tmp_path / "c", np.ones(4), np.ones((2, 3, 3)))
    assert not (tmp_path / "c").exists()


# Damage


LAYOUTS = ("list", "csr_chain", "dense_stack")


@pytest.fixture(scope="module")
def saved(folder):
    """Return a small file of each layout, as bytes."""
    rng = np.random.default_rng(7)
    mask = sp.csr_array(np.tri(4))
    chains = {
        "list": [
            mask,
            sp.csr_array(np.eye(4, dtype=np.float32)),
            BatchedCSR(rng.standard_normal((2, mask.nnz)), mask.indices, mask.indptr, (4, 4)),
            rng.standard_normal((3, 4)),
            rng.standard_normal((2, 5, 3)),
        ],
        "csr_chain": CSRChain(np.ones((6, mask.nnz)), mask.indices, mask.indptr, (4, 4)),
        "dense_stack": rng.standard_normal((6, 2, 4, 4)),
    }
    result = {}
    for layout, jacobians in chains.items():
        save_chain(folder / layout, rng.standard_normal((2, 4)), jacobians)
        result[layout] = (folder / layout).read_bytes()
    return result


def read_part(path):
    """Read the whole as if it were a part."""
    with open_chain(path) as file:
        file.part(0, file.n)


def assert_refused(path, contents, match=None):
    path.write_bytes(contents)
    with pytest.raises(FileError, match=match) as caught:
        load_chain(path)
    with pytest.raises(FileError) as refused:
        read_part(path)
    for error in (caught, refused):
        message = str(error.value)
        assert message.startswith(str(path))
        assert "expected a file written by sparsescan.save_chain" in message
        assert "\n" not in message


def rewritten(contents, **changes):
    """Return the file with other arrays under some keys; None drops the key."""
    return file_of(arrays_of(contents) | changes)


@given(layout=st.sampled_from(LAYOUTS), share=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_refused(folder, saved, layout, share):
    contents = saved[layout]
    assert_refused(folder / "cut", contents[: int(share * len(contents))])


def test_a_header_that_asks_for_less_is_refused(tmp_path, saved):
    """The sum of what such a header leaves unread would not be checked by reading alone."""
    contents = saved["dense_stack"]
    assert contents.count(b"(6, 2, 16)") == 1
    shorter = contents.replace(b"(6, 2, 16)", b"(5, 2, 16)")
    assert_refused(tmp_path / "f.npz", shorter, "Bad CRC-32|has more bytes than its shape")


def chain_in_parts(path):
    """Read a chain as several do of whom each reads a part."""
    with open_chain(path) as file:
        steps = [step for k in range(file.n) for step in steps_of(file.part(k, k + 1))]
        return file.grad, steps


@given(layout=st.sampled_from(LAYOUTS), data=st.data())
def test_a_flipped_bit_changes_nothing_or_is_refused(folder, saved, layout, data):
    contents = bytearray(saved[layout])
    contents[data.draw(st.integers(0, len(contents) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path = folder / "flipped"
    path.write_bytes(contents)
    for read in (load_chain, chain_in_parts):
        # Zip has bytes that say nothing about the arrays, such as dates.
        with contextlib.suppress(FileError):
            for result, expected in zip(read(path), read(folder / layout), strict=True):
                assert_same(result, expected)


@given(layout=st.sampled_from(LAYOUTS), data=st.data())
def test_arrays_that_were_tampered_with_are_refused_or_make_a_sound_chain(
    folder, saved, layout, data
):
    """Checksums are right here: only the reader's own checks stand between file and kernels."""
    arrays = arrays_of(saved[layout])
    integers = [key for key, array in arrays.items() if array.dtype.kind == "i"]
    key = data.draw(st.sampled_from(integers))
    array = arrays[key].reshape(-1).copy()
    if array.size:
        extremes = [-(2**31), -1, 0, 1, 2, 3, 4, 5, 2**31 - 1]
        array[data.draw(st.integers(0, array.size - 1))] = data.draw(st.sampled_from(extremes))
    path = folder / "tampered"
    path.write_bytes(rewritten(saved[layout], **{key: array.reshape(arrays[key].shape)}))
    try:
        grad, jacobians = load_chain(path)
    except FileError:
        pass
    else:
        sparsescan.inclusive_scan(grad, jacobians)
    # Nobody sees all of it who reads a part.
    try:
        with open_chain(path) as file:
            parts = [file.part(k, k + 1) for k in range(file.n)]
    except FileError:
        return
    for part in parts:
        (_, cols), *_ = (pattern.shape for pattern, _ in steps_of(part))
        sparsescan.inclusive_scan(np.ones((2, cols)), part)


KEYS = {
    "list": (
        *("indptr_0", "indices_0", "values_0_0", "values_1_0", "values_2_0", "values_3_0"),
        "values_4_0",
    ),
    "csr_chain": ("indptr_0", "indices_0", "values_0_0"),
    "dense_stack": ("values_0_0",),
}
COMMON = "version", "layout", "grad", "patterns", "groups", "steps"
EVERY_KEY = [(layout, key) for layout, keys in KEYS.items() for key in (*COMMON, *keys)]


def test_a_file_has_no_other_keys(saved):
    for layout, contents in saved.items():
        assert set(arrays_of(contents)) == {*COMMON, *KEYS[layout]}


@pytest.mark.parametrize(("layout", "key"), EVERY_KEY)
def test_each_key_is_needed(tmp_path, saved, layout, key):
    contents = rewritten(saved[layout], **{key: None})
    assert_refused(tmp_path / "f.npz", contents, f"the key '{key}' is missing")


@pytest.mark.parametrize(("layout", "key"), EVERY_KEY)
@pytest.mark.parametrize("dtype", [object, np.complex128, np.float16, "U3"])
def test_each_key_has_its_dtype(tmp_path, saved, layout, key, dtype):
    damaged = np.zeros(arrays_of(saved[layout])[key].shape, dtype)
    name = "Object arrays" if dtype is object else "layout is ''" if key == "layout" else key
    if key == "layout" and dtype not in (object, "U3"):
        name = "layout has dtype"
    assert_refused(tmp_path / "f.npz", rewritten(saved[layout], **{key: damaged}), name)


@pytest.mark.parametrize(("layout", "key"), EVERY_KEY)
def test_each_key_has_its_shape(tmp_path, saved, layout, key):
    damaged = np.stack([arrays_of(saved[layout])[key]] * 2)
    assert_refused(tmp_path / "f.npz", rewritten(saved[layout], **{key: damaged}))


@pytest.mark.parametrize(
    ("key", "change", "match"),
    [
        ("version", lambda a: a + 1, "version is 3; expected 2"),
        ("version", lambda a: a - 1, "version is 1, the format of sparsescan 0.2: save it again"),
        ("layout", lambda a: np.array("heap"), "layout is 'heap'; expected one of list"),
        ("layout", lambda a: np.array("csr_chain"), "groups has 5 rows; expected 1"),
        ("grad", lambda a: a[:, :3], r"grad has shape \(2, 3\); expected \(2, 4\)"),
        ("grad", lambda a: a[0], r"grad has shape \(4,\); expected"),
        ("grad", lambda a: a[[0, 0, 0]], r"grad has shape \(3, 4\)"),
        ("patterns", lambda a: a - [[9, 0, 0]], r"patterns\[0, 0\] is -9; expected 0 to 2"),
        ("patterns", lambda a: np.add(a, [[0, 0, 1]]), "diagonal of shape|indptr|dtype"),
        ("patterns", lambda a: -a, r"patterns\[0\] is general of shape \(-4, -4\)"),
        ("patterns", lambda a: a[:-1], r"groups\[:, 0\] is 3; expected 0 to 2"),
        ("groups", lambda a: np.add(a, [0, 3, 0, 0]), r"groups\[:, 1\] is 3; expected 0 to 2"),
        ("groups", lambda a: np.add(a, [0, 0, 2, 0]), r"groups\[:, 2\] is 2; expected 0 to 1"),
        ("groups", lambda a: a * [1, 1, 1, 0], r"groups\[0, 3\] is 0; expected at least 1"),
        ("groups", lambda a: a * [1, 1, 0, 1], r"values_0_0 has dtype float64 .*expected float32"),
        ("groups", lambda a: a * [1, 0, 1, 1] + [0, 1, 0, 0], "a group is dense with Pattern"),
        ("indptr_0", lambda a: a[:-1], "patterns.* has an indptr of 4 entries; expected 5"),
        (
            "indptr_0",
            lambda a: np.append(a, 0),
            "has an indptr of 6 entries; expected 5",
        ),
        ("indptr_0", lambda a: a + 1, r"patterns\[0\] .*indptr .*starts at 1"),
        ("indptr_0", lambda a: a[::-1], r"patterns\[0\] .*indptr .*starts at 10"),
        ("indptr_0", lambda a: a[[0, 2, 1, 3, 4]], r"patterns\[0\] .*indptr .*falls .*row 1"),
        ("indices_0", lambda a: a[:-1], r"patterns\[0\] .*indptr .*ends at 10; expected 9"),
        ("indices_0", lambda a: np.append(a, 0), r"patterns\[0\] .*indptr .*ends at 10; .* 11"),
        ("indices_0", lambda a: a + 1, r"patterns\[0\] .*index 4 in row 3; expected .*0 to 3"),
        ("indices_0", lambda a: -a, r"patterns\[0\] .*index -1 in row 1"),
        ("indices_0", lambda a: a * 0, "unsorted or duplicate columns in row 1"),
        ("steps", lambda a: a + 1, "steps is 5; expected 0 to 4"),
        ("steps", lambda a: a.astype(int) - 1, "steps is -1; expected 0 to 4"),
        ("steps", lambda a: a * 0, r"values_0_0 has .*expected float64 and \(5, 10\)"),
        ("steps", lambda a: a[[0, 1, 2, 4, 3]], r"jacobians\[3\] has shape"),
        ("values_2_0", lambda a: a[:, :1], r"jacobians.*batch|grad has shape"),
        (
            "values_2_0",
            lambda a: a[..., :-1],
            r"values_2_0 has .*expected float64 and \(1, 2, 10\)",
        ),
        ("values_1_0", lambda a: a.astype(float), "values_1_0 has dtype float64"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, saved, key, change, match):
    damaged = change(arrays_of(saved["list"])[key])
    assert_refused(tmp_path / "f.npz", rewritten(saved["list"], **{key: damaged}), match)


def test_a_pattern_too_large_for_its_file_is_refused(tmp_path, saved):
    for kind, shape in ((1, (2**40, 2**40)), (2, (2**40, 2**40)), (2, (2**40, 0)), (0, (2**62, 1))):
        patterns = np.array([(kind, *shape)] * 4)
        assert_refused(tmp_path / "f.npz", rewritten(saved["list"], patterns=patterns))


@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_block_that_is_missing_or_of_another_size_is_refused(tmp_path, block):
    path = tmp_path / "blocks"
    save_chain(path, np.ones(256), np.ones((6, 256, 256)))
    contents, key = path.read_bytes(), f"values_0_{block}"
    stored = arrays_of(contents)[key]
    assert len(stored) == 2
    assert_refused(path, rewritten(contents, **{key: None}), f"the key '{key}' is missing")
    for other in (stored[:1], stored[:, :-1], np.stack([stored, stored], axis=1)):
        damaged = rewritten(contents, **{key: other})
        assert_refused(path, damaged, r"values_0_\d has .* expected float64 and|grad has shape")


def test_other_files_are_refused(tmp_path):
    for name, (contents, match) in other_files().items():
        assert_refused(tmp_path / name, contents, match)


def test_paths_of_all_kinds_name_one_file(tmp_path):
    path = tmp_path / "steps of ∇.npz"
    grad, stack = np.ones(3), np.ones((2, 3, 3))
    save_chain(os.fsencode(path), grad, stack)
    for name in (path, str(path), os.fsencode(path)):
        assert_same_array(load_chain(name)[1], stack)


def test_nothing_is_unpickled(tmp_path, saved):
    assert_refused(tmp_path / "f.npz", rewritten(saved["list"], grad=bomb()), "allow_pickle=False")
