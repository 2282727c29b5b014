"""The C kernels of the host transport against torch, bit for bit: the same sums in the same order."""

import ctypes
import importlib.machinery
import random
import shutil
import subprocess
import sysconfig
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from plait.comm.shm import native_lib

ROOT = Path(__file__).resolve().parents[2]
# In the order of pl_dtype and of pl_op.
DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
]
OPS = ["sum", "max", "min", "prod"]
HALVES = [torch.bfloat16, torch.float16]
PAIRS = [(dtype, dtype) for dtype in DTYPES]
PAIRS += [pair for half in HALVES for pair in ((half, torch.float32), (torch.float32, half))]
SIZES = [0, 1, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 513, 1023, 1024, 1025, 2100]
STREAMED = 300_007  # items: as much as is written past the caches, in any dtype of four bytes or more
GUARD = 64  # bytes around an array that must not change


@pytest.fixture(scope="session")
def kernels() -> ctypes.CDLL:
    found = native_lib.load()
    if found is None and not compiler():
        pytest.skip(native_lib.unavailable_reason())
    assert found is not None, native_lib.unavailable_reason()
    return found


def compiler() -> str | None:
    return shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0])


class Array:
    """n items at `offset` items from a cache line's boundary, between guards."""

    def __init__(self, values: Tensor, offset: int = 0) -> None:
        size = values.element_size()
        self._bytes = torch.full(
            (values.numel() * size + offset * size + 2 * GUARD + 64,), 0x5A, dtype=torch.uint8
        )
        start = GUARD + (-self._bytes.data_ptr() - GUARD) % 64 + offset * size
        self._span = slice(start, start + values.numel() * size)
        self.values = self._bytes[self._span].view(values.dtype)
        self.values.copy_(values)

    @property
    def pointer(self) -> int:
        return self._bytes.data_ptr() + self._span.start

    def guards_hold(self) -> bool:
        around = torch.cat([self._bytes[: self._span.start], self._bytes[self._span.stop :]])
        return bool((around == 0x5A).all())


def random_values(n: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Integers over their whole range; floats of many sizes, with infinities, NaNs, zeros and denormals."""
    if not dtype.is_floating_point:
        return torch.randint(0, 256, (n * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(
            dtype
        )
    exponents = torch.randint(-3, 4, (n,), generator=generator, dtype=torch.float64)
    values = torch.randn(n, generator=generator, dtype=torch.float64) * 10**exponents
    tiny, huge = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    special = torch.tensor(
        [0.0, -0.0, float("inf"), -float("inf"), float("nan"), tiny / 4, -tiny / 2, huge, -huge]
    )
    which = torch.randint(0, 12 * len(special), (n,), generator=generator)
    chosen = special.to(torch.float64)[which % len(special)]
    return torch.where(which < len(special), chosen, values).to(dtype)


def reduce(
    kernels, op: str, ins: list[Array], outs: list[Array], *, scale=1.0, add=False, squares=None
) -> None:
    in_pointers = (ctypes.c_void_p * len(ins))(*[array.pointer for array in ins])
    out_pointers = (ctypes.c_void_p * len(outs))(*[array.pointer for array in outs])
    in_dtype, out_dtype = (DTYPES.index(arrays[0].values.dtype) for arrays in (ins, outs))
    n = outs[0].values.numel()
    total = None if squares is None else ctypes.byref(squares)
    arguments = (in_pointers, len(ins), out_pointers, len(outs), n, scale, add, total)
    kernels.pl_reduce(in_dtype, out_dtype, OPS.index(op), *arguments)


def expected(op: str, ins: list[Tensor], old: Tensor, *, scale: float, add: bool) -> Tensor:
    """The output that pl_reduce must write, by torch's operations on whole arrays, in the order of `ins`."""
    wide = torch.float32 if ins[0].dtype in HALVES else ins[0].dtype
    total = ins[0].to(wide)
    for item in ins[1:]:
        value = item.to(wide)
        if op in ("sum", "prod"):
            total = total + value if op == "sum" else total * value
        else:
            wins = total > value if op == "max" else total < value
            total = torch.where(wins | (total != total), total, value)
    if scale != 1.0 and wide.is_floating_point:
        total = total * torch.tensor(scale, dtype=wide)
    if add:
        total = old.to(wide) + total
    return total.to(old.dtype)


def assert_same_bits(found: Tensor, wanted: Tensor) -> None:
    """Equal bits; of NaNs, only that they are."""
    assert found.dtype == wanted.dtype
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    same = found.view(bits) == wanted.view(bits)
    if found.dtype.is_floating_point:
        same |= found.isnan() & wanted.isnan()
    wrong = (~same).nonzero().flatten()[:5]
    assert same.all(), f"items {wrong.tolist()}: {found[wrong].tolist()} instead of {wanted[wrong].tolist()}"


def name_of(value: object) -> str:
    if isinstance(value, tuple):
        return "-to-".join(str(dtype).removeprefix("torch.") for dtype in value)
    return str(value)


@pytest.mark.parametrize("num_ins", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("pair", PAIRS, ids=name_of)
def test_a_reduction_is_torchs_own_bit_for_bit(kernels, pair, op, num_ins) -> None:
    chance = random.Random(f"{pair} {op} {num_ins}")
    generator = torch.Generator().manual_seed(chance.randrange(2**32))
    streamed = [STREAMED] if chance.random() < 0.1 else []
    for n in SIZES + SIZES + SIZES + streamed:
        in_dtype, out_dtype = pair
        ins = [Array(random_values(n, in_dtype, generator), chance.randrange(9)) for _ in range(num_ins)]
        outs = [Array(random_values(n, out_dtype, generator), chance.randrange(9)) for _ in range(3)]
        outs = outs[: chance.randint(1, 3)]
        if in_dtype == out_dtype and chance.random() < 0.5:
            outs = chance.sample(ins, chance.randint(1, num_ins)) + outs[1:]
        options = {"scale": chance.choice([1.0, 0.5, 1 / 3]), "add": chance.random() < 0.5}
        wanted = expected(op, [array.values for array in ins], outs[0].values, **options)
        kept = [(array, array.values.clone()) for array in ins if array not in outs]
        squares = ctypes.c_double(1.0) if chance.random() < 0.5 else None
        reduce(kernels, op, ins, outs, **options, squares=squares)
        for array in outs:
            assert_same_bits(array.values, wanted)
        for array, before in kept:
            assert_same_bits(array.values, before)
        assert all(array.guards_hold() for array in ins + outs)
        if squares is not None:
            torch.testing.assert_close(
                squares.value, 1.0 + float(wanted.double().square().sum()), rtol=1e-13, atol=0, equal_nan=True
            )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=name_of)
def test_large_outputs_are_the_same_at_every_alignment(kernels, dtype) -> None:
    """Written past the caches or not, on a line's boundary or not, in place or not: the same bits."""
    n = 2 * STREAMED
    generator = torch.Generator().manual_seed(5)
    values = [torch.randn(n, dtype=torch.float64, generator=generator).to(dtype) for _ in range(2)]
    wanted = expected("sum", values, values[0], scale=0.1, add=False)
    sums = set()
    for offsets in [(0, 0), (0, 16 * 3), (1, 1), (3, 0), (5, 5 + 64), (31, 32)]:
        for in_place in (False, True):
            ins = [Array(value, offset) for value, offset in zip(values, offsets, strict=True)]
            outs = ins if in_place else [Array(torch.zeros(n, dtype=dtype), offset) for offset in offsets]
            squares = ctypes.c_double(0.0)
            reduce(kernels, "sum", ins, outs, scale=0.1, squares=squares)
            for array in outs:
                assert_same_bits(array.values, wanted)
                assert array.guards_hold()
            sums.add(squares.value)
    assert len(sums) == 1


def test_a_sum_runs_in_the_order_of_its_inputs(kernels) -> None:
    """In bf16 and f16 too it is rounded once, at the end."""
    small = [Array(torch.full((40,), value)) for value in (1e8, 1.0, -1e8, 1.0)]
    out = Array(torch.zeros(40))
    reduce(kernels, "sum", small, [out])
    assert out.values.tolist() == [1.0] * 40
    reduce(kernels, "sum", [small[0], small[2], small[1], small[3]], [out])
    assert out.values.tolist() == [2.0] * 40
    halves = [Array(torch.full((40,), value, dtype=torch.bfloat16)) for value in (256.0, 1.0, 1.0)]
    total = Array(torch.zeros(40, dtype=torch.bfloat16))
    reduce(kernels, "sum", halves, [total])
    assert total.values.tolist() == [258.0] * 40  # 256 + 1 is 256 in bf16


@pytest.mark.parametrize("half", HALVES, ids=name_of)
def test_every_pattern_of_16_bits_is_widened_exactly(kernels, half) -> None:
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(half)
    out = Array(torch.zeros(65536))
    reduce(kernels, "sum", [Array(patterns)], [out])
    assert_same_bits(out.values, patterns.float())
    again = Array(torch.zeros(65536, dtype=half))
    reduce(kernels, "sum", [Array(patterns)], [again])
    assert_same_bits(again.values, patterns)


@pytest.mark.parametrize("half", HALVES, ids=name_of)
def test_rounding_to_16_bits_is_to_nearest_even_around_every_pattern(kernels, half) -> None:
    """Each value, the midpoint to the next one up, and the floats on either side of both."""
    bits = torch.arange(65536, dtype=torch.int32)
    here = bits.to(torch.int16).view(half).float().numpy()
    if half is torch.bfloat16:  # f16's are exact in float32; bf16's midpoints are a bit's matter
        middle = ((bits << 16) | 0x8000).view(torch.float32).numpy()
    else:
        following = (bits + 1).clamp(max=65535).to(torch.int16).view(half).float().numpy()
        middle = np.where(np.isfinite(following), here / 2 + following / 2, np.copysign(65520, here))
        middle = middle.astype(np.float32)
    down, up = np.float32(-np.inf), np.float32(np.inf)
    with np.errstate(over="ignore", invalid="ignore"):
        around = [
            f(x)
            for x in (here, middle)
            for f in (np.copy, lambda x: np.nextafter(x, up), lambda x: np.nextafter(x, down))
        ]
    values = torch.from_numpy(np.concatenate(around))
    out = Array(torch.zeros(values.numel(), dtype=half))
    reduce(kernels, "sum", [Array(values)], [out])
    assert_same_bits(out.values, values.to(half))


def test_overflow_of_f16_is_infinite_and_nan_survives_every_operation(kernels) -> None:
    edge = Array(torch.tensor([65519.99, 65520.0, -65520.0, 1e38, float("nan"), -float("inf")]).repeat(9))
    out = Array(torch.zeros(54, dtype=torch.float16))
    reduce(kernels, "sum", [edge], [out])
    assert_same_bits(
        out.values, torch.tensor([65504, *map(float, ("inf", "-inf", "inf", "nan", "-inf"))]).half().repeat(9)
    )
    nan, one = (torch.full((50,), value) for value in (float("nan"), 1.0))
    for dtype in DTYPES[:4]:
        for op in OPS:
            for order in [(nan, one, one), (one, nan, one), (one, one, nan)]:
                result = Array(torch.zeros(50, dtype=dtype))
                reduce(kernels, op, [Array(value.to(dtype)) for value in order], [result])
                assert result.values.isnan().all(), (dtype, op)


@pytest.mark.parametrize("num_bytes", [0, 1, 63, 4097, (1 << 20) - 1, (1 << 20) + 1, 3_000_001])
def test_a_copy_is_whole_and_touches_nothing_else(kernels, num_bytes) -> None:
    source = torch.randint(
        0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(2)
    )
    for from_offset, to_offset in [(0, 0), (1, 0), (0, 1), (7, 33)]:
        src, dst = Array(source, from_offset), Array(torch.zeros_like(source), to_offset)
        kernels.pl_copy(dst.pointer, src.pointer, num_bytes)
        assert torch.equal(dst.values, source)
        assert dst.guards_hold()


def test_an_item_has_the_bytes_of_torchs(kernels) -> None:
    assert [kernels.pl_itemsize(i) for i in range(len(DTYPES))] == [dtype.itemsize for dtype in DTYPES]


@pytest.mark.skipif(not compiler(), reason="no C compiler")
def test_the_loops_of_all_processors_agree(tmp_path) -> None:
    """tests/native, compiled as the package is: without it, only this processor's widest loops are run."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (extension,) = project["tool"]["setuptools"]["ext-modules"]
    native = ROOT / "src/plait/comm/shm/native"
    sources = [*(ROOT / "tests/native").glob("*.c"), *(ROOT / source for source in extension["sources"])]
    program = tmp_path / "native"
    command = [compiler(), *extension["extra-compile-args"], "-Wall", "-Wextra", "-Werror", f"-I{native}"]
    subprocess.run([*command, *sources, "-o", program, "-lpthread"], check=True, timeout=120)
    done = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "native: passed\n"), done.stderr


def test_an_unusable_library_is_an_error_with_the_reason(tmp_path) -> None:
    find = native_lib._find
    assert find(tmp_path) == (
        None,
        f"{tmp_path}/_native*.so is missing: plait was installed without a C compiler",
    )
    foreign = tmp_path / f"_native{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    for content in (b"not a library", Path(np._core._multiarray_umath.__file__).read_bytes()):
        find.cache_clear()
        foreign.write_bytes(content)
        found, why = find(tmp_path)
        assert found is None
        assert str(foreign) in why
        assert "reinstall plait" in why


@pytest.mark.parametrize("dtype", HALVES)
def test_16_bit_floats_are_added_to_float32_as_torch_adds_them(dtype: torch.dtype, kernels: object) -> None:
    values, out = (
        torch.randn(5, 613, generator=torch.Generator().manual_seed(0)).to(dtype),
        torch.randn(5, 613),
    )
    expected = out + values
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert native_lib.add_widened(out, values)
        assert torch.equal(out, expected)
        assert not native_lib.add_widened(out, values.float())
        assert not native_lib.add_widened(out.double(), values)
        assert not native_lib.add_widened(out.t(), values.t())
        assert torch.equal(out, expected)
    finally:
        torch.set_num_threads(threads)
