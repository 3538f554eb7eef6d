"""`Matmul`, `Linear` and `quantize_` on the CPU, above a plain compiler."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from poison import poison_outputs

import ladder
from ladder.ir.gemm import Gemm
from ladder.lower.build import emit
from ladder.runtime import compile as runtime_compile
from ladder.runtime.tokens import quantize_tokens
from schedules.schedule import GpuSchedule
from targets import get_device
from tile_types.errors import DTypeError, ScheduleError

pytestmark = pytest.mark.usefixtures("plain_compiler")

N, K = 48, 72
LIMITS = {"float16": 5e-4, "bfloat16": 3e-3, "float32": 1e-5}


def relative_error(y: torch.Tensor, exact: torch.Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm())


def matrix(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("lead", [(5,), (1,), (2, 3), (), (0,), (2, 0)])
@pytest.mark.parametrize("activation", ["float16", "bfloat16", "float32"])
def test_matmul_equals_float64(
    activation: str, lead: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_outputs(monkeypatch)
    weight = ladder.quantize(matrix(N, K), "int4", group_size=24)
    op = ladder.Matmul(N, K, "int4", activation, group_size=24)
    x = matrix(*lead, K, dtype=getattr(torch, activation))
    y = op(x, op.pack(weight))
    exact = x.double() @ weight.dequantize("float64").T
    assert y.shape == (*lead, N)
    assert y.dtype == x.dtype
    assert y.numel() == 0 or relative_error(y, exact) <= LIMITS[activation]


def test_rows_that_are_strided_unaligned_or_of_odd_length() -> None:
    """K = 70 float16 is no multiple of 16 bytes; slices start anywhere."""
    weight = ladder.quantize(matrix(N, 70), "int8")
    op = ladder.Matmul(N, 70, "int8")
    packed = op.pack(weight)
    dense = weight.dequantize("float64").T
    flat = matrix(4 * 70 + 1, dtype=torch.float16)
    for x in (flat[1:].view(4, 70), matrix(4, 140, dtype=torch.float16)[:, 3:73], matrix(70, 4).half().T):
        assert relative_error(op(x, packed), x.double() @ dense) <= 5e-4


def test_bias_and_output_type() -> None:
    weight = ladder.quantize(matrix(N, K), "nf4", group_size=24)
    op = ladder.Matmul(N, K, "nf4", "bfloat16", group_size=24, bias=True, output="float32")
    x, bias = matrix(3, K, dtype=torch.bfloat16), matrix(N, seed=1)
    y = op(x, op.pack(weight), bias)
    assert y.dtype == torch.float32
    assert relative_error(y, x.double() @ weight.dequantize("float64").T + bias.double()) <= 1e-5


def test_int8_activations_are_quantized_per_row() -> None:
    weight = ladder.quantize(matrix(N, K), "int4", group_size=24)
    op = ladder.Matmul(N, K, "int4", "int8", group_size=24, output="float32")
    x = matrix(2, 3, K, dtype=torch.bfloat16) * torch.tensor([1e-3, 1.0, 1e3]).bfloat16()[:, None]
    packed, dense = op.pack(weight), weight.dequantize("float64").T
    codes, scale = quantize_tokens(x, "int8")
    exact = (codes.double() * scale[..., None].double()) @ dense
    for y in (op(x, packed), op(codes, packed, token_scale=scale)):
        assert relative_error(y, exact) <= 1e-5
    assert relative_error(op(codes, packed), codes.double() @ dense) <= 1e-5
    assert relative_error(op(x, packed), x.double() @ dense) <= 2e-2


@pytest.mark.parametrize(("activation", "worst"), [("int8", 2e-2), ("fp8_e4m3", 4e-2), ("fp8_e5m2", 8e-2)])
def test_token_quantization_error(activation: str, worst: float) -> None:
    x = matrix(4, 3, K, dtype=torch.bfloat16) * torch.tensor([1e-30, 1.0, 1e30]).bfloat16()[:, None]
    codes, scale = quantize_tokens(x, activation)
    assert codes.shape == x.shape
    assert scale.shape == x.shape[:-1]
    back = codes.double() * scale[..., None].double()
    assert all(relative_error(back[:, row], x[:, row].double()) <= worst for row in range(3))


def test_token_quantization_values() -> None:
    codes, scale = quantize_tokens(torch.tensor([[0.0, 0.0], [254.0, -127.0], [1.0, 5.0]]), "int8")
    assert codes.tolist() == [[0, 0], [127, -64], [25, 127]]  # -63.5 ties to even: -64
    assert scale[1:].tolist() == pytest.approx([2.0, 5 / 127])
    codes, scale = quantize_tokens(torch.tensor([[448.0 * 2, -1.0]]), "fp8_e4m3")
    assert codes.float().tolist() == [[448.0, -0.5]]
    assert scale.tolist() == [2.0]


@pytest.mark.parametrize("activation", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rows_with_infinity_or_nan_keep_saying_so(activation: str, dtype: torch.dtype) -> None:
    x = matrix(5, 71, dtype=dtype)
    x[1, 70], x[2, 3], x[3, 40] = torch.nan, torch.inf, -torch.inf
    _, scale = ladder.quantize_tokens(x, activation)
    assert scale.isnan().tolist() == [False, True, True, True, False]


def test_what_cannot_be_quantized_says_so() -> None:
    with pytest.raises(ladder.DTypeError, match="quantized to int8, fp8_e4m3, fp8_e5m2, got 'int4'"):
        ladder.quantize_tokens(matrix(2, 8), "int4")
    with pytest.raises(ladder.DTypeError, match="got 'int32'"):
        ladder.quantize_tokens(torch.ones(2, 8, dtype=torch.int32), "fp8_e4m3")


@pytest.mark.parametrize("activation", ["int8", "fp8_e4m3"])
def test_groups_of_tokens(activation: str) -> None:
    x = matrix(2, 5, 300, dtype=torch.bfloat16)
    codes, scale = ladder.quantize_tokens(x, activation, group_size=128)
    assert codes.shape == x.shape
    assert scale.shape == (2, 5, 3)
    back = codes.double() * scale.double().repeat_interleave(128, dim=-1)[..., :300]
    assert relative_error(back, x.double()) <= 4e-2
    whole, whole_scale = ladder.quantize_tokens(x[..., 256:], activation)
    torch.testing.assert_close(scale[..., 2], whole_scale)
    assert (codes[..., 256:].float() - whole.float()).abs().max() <= 1 or activation != "int8"


def test_block_scaled_weights_and_tokens_are_for_gpus() -> None:
    weight = ladder.quantize(matrix(200, 300), "fp8_e4m3", block=(128, 128))
    op = ladder.Matmul(200, 300, "fp8_e4m3", "fp8_e4m3", group_size=128, token_group=128)
    assert op.gemm.token_scale_shape == (3,)
    assert op.pack(weight).gemm == op.gemm
    assert "pipeline='wgmma'" in str(op.lower("cuda/sm_90a").plan)
    schedule = GpuSchedule("digits", 1, placement="accumulator")
    with pytest.raises(ScheduleError, match="digits' does not serve token_group"):
        emit(op.gemm, get_device("cuda/sm_90a"), schedule, "kernel")


@pytest.mark.usefixtures("empty_cache")
def test_builds_once_for_every_m_and_shape(plain_compiler: list[Gemm]) -> None:
    for n, k in ((N, K), (2 * N, 3 * K)):
        weight = ladder.quantize(matrix(n, k), "int4", group_size=24)
        op = ladder.Matmul(n, k, "int4", group_size=24, plan=single_plan())
        packed = op.pack(weight)
        for m in (1, 2, 100):
            op(matrix(m, k, dtype=torch.float16), packed)
    assert len(plain_compiler) == 1
    runtime_compile.forget()
    fresh = ladder.Matmul(N, K, "int4", group_size=24, plan=single_plan())
    fresh(matrix(7, K, dtype=torch.float16), fresh.pack(ladder.quantize(matrix(N, K), "int4", group_size=24)))
    assert len(plain_compiler) == 1  # from disk


def single_plan():
    from ladder.ir import Gemm
    from schedules.cpu_policy import proposal
    from schedules.schedule import Plan
    from targets import get_device

    return Plan(
        ((1 << 16, proposal(Gemm(N, K, "int4", group_size=24), get_device("cpu/avx2"), "fma", 1, 16)),)
    )


@pytest.mark.usefixtures("empty_cache")
def test_cleared_cache_between_lowering_and_calling(plain_compiler: list[Gemm]) -> None:
    op = ladder.Matmul(N, K, "int8", plan=single_plan())
    assert op.lower("cpu").kernels[0].library.is_file()
    ladder.KernelCache().clear()
    assert op(matrix(1, K, dtype=torch.float16), op.pack(ladder.quantize(matrix(N, K), "int8"))).shape == (
        1,
        N,
    )
    assert len(plain_compiler) == 2


def test_without_cache_nothing_is_written(tmp_path, plain_compiler: list[Gemm]) -> None:
    with ladder.knobs.override(cache=False, cache_dir=tmp_path / "none"):
        op = ladder.Matmul(N, K, "int8")
        op(matrix(1, K, dtype=torch.float16), op.pack(ladder.quantize(matrix(N, K), "int8")))
    assert plain_compiler
    assert not (tmp_path / "none").exists()


def test_unwritable_cache_still_computes(tmp_path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with ladder.knobs.override(cache_dir=tmp_path / "file"):
        op = ladder.Matmul(N, K, "int8")
        y = op(matrix(1, K, dtype=torch.float16), op.pack(ladder.quantize(matrix(N, K), "int8")))
    assert y.shape == (1, N)
    assert "LADDER_CACHE_DIR" in caplog.text


# ---- wrong input ----------------------------------------------------------------------
@pytest.fixture
def pair():
    op = ladder.Matmul(N, K, "int4", group_size=24)
    return op, op.pack(ladder.quantize(matrix(N, K), "int4", group_size=24))


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (torch.zeros(3, K), ladder.DTypeError, ["float32", "float16"]),
        (torch.zeros(3, K, dtype=torch.int32), ladder.DTypeError, ["int32", "float16"]),
        (torch.zeros(3, K + 1).half(), ladder.ShapeError, [str(K), str(K + 1)]),
        (torch.tensor(1.0).half(), ladder.ShapeError, ["scalar"]),
        (torch.zeros(3, K, device="meta").half(), ladder.LadderError, ["meta"]),
        ([[0.0] * K], ladder.DTypeError, ["list"]),
        (np.zeros((3, K), np.float16), ladder.DTypeError, ["ndarray"]),
        (torch.zeros(3, K).half().to_sparse(), ladder.DTypeError, ["sparse_coo", "to_dense"]),
        (torch.eye(K).half().to_sparse_csr(), ladder.DTypeError, ["sparse_csr", "to_dense"]),
    ],
)
def test_wrong_activations_are_named(pair, x, error, words) -> None:
    op, packed = pair
    with pytest.raises(error) as caught:
        op(x, packed)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"N": 2.0}, ladder.ShapeError, "N must be a whole number, got 2.0"),
        ({"K": "64"}, ladder.ShapeError, "K must be a whole number, got '64'"),
        ({"group_size": True}, ladder.ShapeError, "group_size must be a whole number, got True"),
        ({"weight": None}, ladder.UnknownNameError, "unknown type None"),
        ({"activation": torch.float16}, ladder.UnknownNameError, "torch.float16; did you mean 'float16'"),
        ({"target": 90}, ladder.UnknownNameError, "unknown device 90"),
        ({"epilogue": "silu"}, ladder.DTypeError, r"write \('silu',\)"),
        ({"bias": torch.zeros(4)}, ladder.DTypeError, "bias must be True or False, got Tensor"),
        ({"token_scale": "yes"}, ladder.DTypeError, "token_scale must be True or False, got str"),
    ],
)
def test_options_of_another_kind_are_named(options, error, message) -> None:
    with pytest.raises(error, match=message):
        ladder.Matmul(**{"N": 4, "K": 64, "weight": "int4", **options})


def test_numpy_numbers_are_extents() -> None:
    op = ladder.Matmul(np.int64(4), np.int32(64), "int4", group_size=np.int16(32))
    assert copy.deepcopy(op).gemm == ladder.Matmul(4, 64, "int4", group_size=32).gemm


def test_wrong_weight_bias_and_scale_are_named(pair) -> None:
    op, packed = pair
    x = torch.zeros(3, K).half()
    other = ladder.Matmul(N, K, "int4", group_size=36)
    with pytest.raises(ladder.ShapeError, match="group_size=36"):
        other(x, packed)
    with pytest.raises(ladder.ShapeError, match="group size is 24, expected 36"):
        other.pack(ladder.quantize(matrix(N, K), "int4", group_size=24))
    with pytest.raises(ladder.ShapeError, match="K is 72, expected 144"):
        ladder.Matmul(N, 2 * K, "int4").pack(ladder.quantize(matrix(N, K), "int4"))
    with pytest.raises(ladder.ShapeError, match="type is int4, expected int3"):
        ladder.Matmul(N, K, "int3").pack(ladder.quantize(matrix(N, K), "int4"))
    with pytest.raises(ladder.ShapeError, match="without bias"):
        op(x, packed, torch.zeros(N).half())
    with pytest.raises(ladder.ShapeError, match="without token_scale"):
        op(x, packed, token_scale=torch.ones(3))
    biased = ladder.Matmul(N, K, "int4", group_size=24, bias=True)
    with pytest.raises(ladder.ShapeError, match="needs bias"):
        biased(x, packed)
    with pytest.raises(ladder.ShapeError, match="48 elements"):
        biased(x, packed, torch.zeros(N + 1).half())
    with pytest.raises(ladder.DTypeError, match=r"bias must be torch\.float16"):
        biased(x, packed, torch.zeros(N))
    with pytest.raises(ladder.DeviceError, match="bias is on meta"):
        biased(x, packed, torch.zeros(N, device="meta").half())


@pytest.mark.parametrize("operand", ["quantized", torch.zeros(4), [torch.zeros(4)], None])
def test_weights_that_are_not_packed_or_not_quantized_are_named(pair, operand) -> None:
    op, quantized = pair[0], ladder.quantize(matrix(N, K), "int3", group_size=36)
    experts = ladder.GroupedMatmul(E=2, N=N, K=K, weight="int3", activation="float16", group_size=36)
    x = matrix(3, K).half()
    packed = quantized if operand == "quantized" else operand
    for call in (
        lambda: op(x, packed),
        lambda: op(x.requires_grad_(), packed),
        lambda: experts(x, packed, torch.zeros(3, dtype=torch.int32)),
    ):
        with pytest.raises(ladder.DTypeError, match=r"what this operator's pack\(weight\) returned, got "):
            call()
    if operand != "quantized":
        for pack in (op.pack, lambda weight: experts.pack([weight, weight])):
            with pytest.raises(ladder.DTypeError, match=r"what ladder\.quantize(\(.*\))? returned, got "):
                pack(operand)


def test_wrong_problem_is_named() -> None:
    with pytest.raises(ladder.UnknownNameError, match="'int4'"):
        ladder.Matmul(N, K, "imt4")
    with pytest.raises(ladder.UnknownNameError, match="float16"):
        ladder.Matmul(N, K, "int4", "flaot16")
    with pytest.raises(ladder.UnknownNameError, match="silu"):
        ladder.Matmul(N, K, "int4", epilogue=("sillu",))
    with pytest.raises(ladder.UnknownNameError, match="sm_90a"):
        ladder.Matmul(N, K, "int4", target="cuda/sm_90")
    with pytest.raises(ladder.ConversionError, match="float16"):
        ladder.Matmul(N, K, "fp6_e2m3", "int8")
    with pytest.raises(ladder.ConversionError, match="bfloat16 or"):
        ladder.Matmul(N, K, "bfloat16", "float16")
    for group_size in (0, -2):
        with pytest.raises(ladder.ShapeError, match="group_size"):
            ladder.Matmul(N, K, "int4", group_size=group_size)
    with pytest.raises(ladder.ShapeError, match="blocks of 32"):
        ladder.Matmul(N, K, "mxfp4", group_size=64)
    with pytest.raises(ladder.ValueRangeError, match=r"\[1, 2\]"):
        ladder.quantize(torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, float("nan")]]), "int4")
    with pytest.raises(ladder.ConversionError, match="no core for int8"):
        ladder.Matmul(N, K, "int4", "int8").explain("cuda/sm_70")
    op = ladder.Matmul(N, K, "int4", target="cuda/sm_80")
    with pytest.raises(ladder.DeviceError, match="cuda/sm_80"):
        op(torch.zeros(1, K).half(), op.pack(ladder.quantize(matrix(N, K), "int4")))


# ---- copies, descriptions -------------------------------------------------------------
def test_operator_copies_and_pickles_without_its_kernels(pair) -> None:
    op, packed = pair
    x = matrix(2, K, dtype=torch.float16)
    y = op(x, packed)
    for again in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert again.gemm == op.gemm
        assert torch.equal(again(x, packed), y)


def test_help_shows_what_a_matmul_takes() -> None:
    names = list(inspect.signature(ladder.Matmul).parameters)
    assert names[:4] == ["N", "K", "weight", "activation"]
    assert "batch_invariant" in names


def test_unknown_stages_are_refused_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ladder.api.lowered.Lowered.kernel", None)
    with pytest.raises(ladder.UnknownNameError, match=r"stage of .*'ptx'"):
        ladder.Matmul(N=64, K=64, weight="int4").lower("cpu").source("ptx")


def test_stages_and_explanation(pair) -> None:
    op, _ = pair
    lowered = op.lower("cpu/avx2")
    assert "int4" in lowered.source("ir")
    assert "use fma for matmul" in lowered.source("schedule")
    assert "acc += x.cache · w.register by fma" in lowered.source("tile")
    assert lowered.source("tir", m=3).startswith("plain ")
    with pytest.raises(ladder.UnknownNameError, match="tir"):
        lowered.source("tirr")
    text = ladder.Matmul(N, K, "int4", group_size=32).explain("cuda/sm_90a")
    assert "wgmma" in text
    assert "µs" in text


# ---- modules --------------------------------------------------------------------------
def layer(dtype: torch.dtype = torch.float16, bias: bool = True) -> torch.nn.Linear:
    torch.manual_seed(3)
    return torch.nn.Linear(K, N, bias=bias, dtype=dtype)


def exact_of(module: ladder.Linear, x: torch.Tensor) -> torch.Tensor:
    exact = x.double() @ module.canonical.dequantize("float64").T
    return exact if module.bias is None else exact + module.bias.double()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weight", ["mxfp4", "uint4"])
def test_linear_from_linear(weight: str, dtype: torch.dtype, bias: bool) -> None:
    source = layer(dtype, bias)
    options = {"group_size": 24, "zero": "float"} if weight == "uint4" else {}
    module = ladder.Linear.from_linear(source, weight=weight, **options)
    x = matrix(2, 5, K, dtype=dtype)
    with torch.no_grad():
        y = module(x)
        assert y.dtype == dtype
        assert relative_error(y, exact_of(module, x)) <= LIMITS[str(dtype).split(".")[1]]
        assert relative_error(y, source(x).double()) < 0.2


@pytest.mark.parametrize("keep_canonical", [True, False])
def test_state_dict_round_trip(keep_canonical: bool) -> None:
    module = ladder.Linear.from_linear(layer(), "nf4", group_size=24, keep_canonical=keep_canonical)
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    fresh = ladder.Linear(K, N, weight="nf4", group_size=24, dtype=torch.float16)
    with pytest.raises(ladder.LadderError, match="no weight yet"):
        fresh(torch.zeros(1, K).half())
    assert (
        str(fresh.load_state_dict(torch.load(buffer, weights_only=True))) == "<All keys matched successfully>"
    )
    x = matrix(3, K, dtype=torch.float16)
    assert torch.equal(fresh(x), module(x))
    assert fresh.state_dict().keys() == module.state_dict().keys()
    assert (module.canonical is None) != keep_canonical
    assert hasattr(module, "weight") == keep_canonical


def test_state_dict_goes_through_safetensors(tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    module = ladder.Linear.from_linear(layer(), "mxfp4")
    save_file(module.state_dict(), tmp_path / "model.safetensors")
    fresh = ladder.Linear(K, N, weight="mxfp4", dtype=torch.float16)
    fresh.load_state_dict(load_file(tmp_path / "model.safetensors"))
    x = matrix(3, K, dtype=torch.float16)
    assert torch.equal(fresh(x), module(x))


def test_state_dict_of_another_weight_is_refused() -> None:
    state = ladder.Linear.from_linear(layer(), "int4", group_size=24).state_dict()
    with pytest.raises(RuntimeError, match="group size is 24, expected 36"):
        ladder.Linear(K, N, weight="int4", group_size=36, dtype=torch.float16).load_state_dict(state)
    with pytest.raises(RuntimeError, match="Missing key"):
        ladder.Linear(K, N, weight="int4", dtype=torch.float16).load_state_dict({"bias": torch.zeros(N)})
    state["weight.description"] = state["weight.description"][:-5]
    with pytest.raises(RuntimeError, match="description is damaged"):
        ladder.Linear(K, N, weight="int4", group_size=24, dtype=torch.float16).load_state_dict(state)


def test_moving_and_converting_a_module() -> None:
    module = ladder.Linear.from_linear(layer(torch.float32), "int4", group_size=24)
    codes = module.canonical.codes()
    x = matrix(2, K)
    for dtype, limit in ((torch.float16, 5e-4), (torch.bfloat16, 3e-3), (torch.float32, 1e-5)):
        module = module.to(dtype)
        y = module(x.to(dtype))
        assert (y.dtype, module.bias.dtype) == (dtype, dtype)
        assert relative_error(y, exact_of(module, x.to(dtype))) <= limit
    with pytest.raises(ladder.DTypeError, match="float64"):
        copy.deepcopy(module).double()
    away = copy.deepcopy(module).to("meta")
    assert away.bias.is_meta
    back = away.to_empty(device="cpu")
    assert torch.equal(torch.as_tensor(back.canonical.codes()), torch.as_tensor(codes))
    back.bias.data.copy_(module.bias.data)
    assert torch.equal(back(x), module(x))


def saved_and_loaded(module: torch.nn.Module) -> torch.nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weight", ["int4", "nf4", "fp8_e4m3", "mxfp4", "nvfp4"])
def test_module_copies_and_pickles(weight: str, dtype: torch.dtype) -> None:
    module = ladder.Linear.from_linear(layer(dtype), weight)
    x = matrix(2, K, dtype=dtype)
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), saved_and_loaded(module)):
        assert torch.equal(again(x), module(x))
        assert {name: each.dtype for name, each in again.named_buffers()} == {
            name: each.dtype for name, each in module.named_buffers()
        }
        assert all(torch.equal(again.state_dict()[name], each) for name, each in module.state_dict().items())
        assert all(again.get_buffer(f"packed_{name}") is each for name, each in again._packed.arrays.items())
        again.load_state_dict(module.state_dict())
        assert torch.equal(again(x), module(x))
    assert module._matmul.gemm.weight in repr(module)


def test_kernels_keep_their_memory_where_a_module_goes_to_another_process() -> None:
    """Torch moves what it pickles for one to shared memory, in place, and frees what it was in."""
    module, x = ladder.Linear.from_linear(layer(torch.float32), "int4"), matrix(2, K)
    expected = module(x)
    ForkingPickler.dumps(module)
    assert all(buffer.is_shared() for buffer in module._packed.buffers)
    filled = [torch.full_like(buffer, 3) for buffer in module.buffers() for _ in range(50)]
    assert torch.equal(module(x), expected)
    del filled


def test_autocast_converts_the_input() -> None:
    module = ladder.Linear.from_linear(layer(torch.bfloat16), "int4", group_size=24)
    x = matrix(2, K)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(x), module(x.bfloat16()))
        for other in (torch.int32, torch.complex64, torch.float64):
            with pytest.raises(ladder.DTypeError, match=f"x is {other}"):
                module(x.to(other))
    with pytest.raises(ladder.DTypeError):
        module(x)


def test_eight_bit_activation_in_a_module() -> None:
    module = ladder.Linear.from_linear(layer(torch.bfloat16), "int4", group_size=24, activation="int8")
    x = matrix(2, K, dtype=torch.bfloat16)
    y = module(x)
    assert y.dtype == torch.bfloat16
    assert relative_error(y, exact_of(module, x)) < 2e-2


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(K, K)
        self.second = self.first
        self.head = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(K, N))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x)))


def test_quantize_in_place() -> None:
    model = Model()
    x = matrix(2, K)
    before = model(x).detach()
    assert ladder.quantize_(model, "int8", group_size=24) is model
    assert isinstance(model.first, ladder.Linear)
    assert model.second is model.first
    assert isinstance(model.head[1], ladder.Linear)
    assert relative_error(model(x).detach(), before.double()) < 2e-2


def test_quantize_in_place_filter_and_failure() -> None:
    model = Model()
    ladder.quantize_(model, "int8", filter=lambda name, module: name == "head.1")
    assert type(model.first) is torch.nn.Linear
    assert isinstance(model.head[1], ladder.Linear)
    broken = Model()
    with torch.no_grad():
        broken.head[1].weight[0, 0] = float("inf")
    with pytest.raises(ladder.ValueRangeError) as caught:
        ladder.quantize_(broken, "int8")
    assert "head.1" in "".join(caught.value.__notes__)
    assert type(broken.first) is torch.nn.Linear
    with pytest.raises(ladder.ShapeError, match="from_linear"):
        ladder.quantize_(torch.nn.Linear(4, 4))


# ---- expressions ----------------------------------------------------------------------
def test_expression_becomes_an_operator() -> None:
    a = ladder.tensor("A", ("M", K), "float16")
    b = ladder.tensor("B", (N, K), "nf4", group_size=24)
    c = ladder.compute(("M", N), lambda m, n, k: a[m, k] * b[n, k], reduce={"k": K}, output="float16")
    op = ladder.compile_expression(c)
    weight = ladder.quantize(matrix(N, K), "nf4", group_size=24)
    x = matrix(3, K, dtype=torch.float16)
    assert relative_error(op(x, op.pack(weight)), x.double() @ weight.dequantize("float64").T) <= 5e-4


NEGATED = ("x", "bias", "token_scale")


@pytest.mark.parametrize("negated", NEGATED)
def test_operands_negated_where_they_are_read(negated: str) -> None:
    """As the imaginary part of a conjugate is: its memory holds other bits than its values."""
    weight = ladder.quantize(matrix(N, K), "int4", group_size=24)
    op = ladder.Matmul(N, K, "int4", "int8", group_size=24, bias=True)
    codes, scale = quantize_tokens(matrix(5, K), "int8")
    operands = {"x": codes, "bias": matrix(N), "token_scale": scale}
    given = operands | {negated: torch._neg_view(operands[negated])}
    packed = op.pack(weight)
    expected = op(packed=packed, **(operands | {negated: -operands[negated]}))
    assert torch.equal(op(packed=packed, **given), expected)


@pytest.mark.parametrize("activation", ["float32", "int8"])
def test_rows_of_conjugates(activation: str) -> None:
    weight = ladder.quantize(matrix(N, K), "int4", group_size=24)
    x = torch.complex(matrix(5, K), matrix(5, K, seed=1)).conj().imag
    op = ladder.Matmul(N, K, "int4", activation, group_size=24)
    assert torch.equal(op(x, op.pack(weight)), op(x.resolve_neg(), op.pack(weight)))
    experts = ladder.GroupedMatmul(1, N, K, "int4", activation, group_size=24)
    offsets, packed = torch.tensor([0, 5], dtype=torch.int32), experts.pack([weight])
    assert torch.equal(experts(x, packed, offsets), experts(x.resolve_neg(), packed, offsets))


def test_operands_that_are_no_dense_tensors() -> None:
    op = ladder.Matmul(N, K, "int4", "float32", group_size=24, bias=True)
    packed = op.pack(ladder.quantize(matrix(N, K), "int4", group_size=24))
    with pytest.raises(DTypeError, match="bias must be a torch tensor, got ndarray"):
        op(matrix(2, K), packed, bias=np.zeros(N, np.float32))
    with pytest.raises(DTypeError, match="x is nested"):
        op(torch.nested.nested_tensor([matrix(2, K)]), packed, bias=matrix(N))


def test_a_layer_is_where_its_quantized_weight_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless that is the CPU: then it is where torch makes tensors."""
    weight = ladder.quantize(torch.randn(8, 64), "int4", group_size=32)
    elsewhere = weight.to("meta")
    monkeypatch.setattr(ladder.Linear, "_fill", lambda self, given, bias: None)
    assert ladder.Linear.from_quantized(elsewhere)._where.type == "meta"
    assert ladder.Linear.from_quantized(elsewhere, device="cpu")._where.type == "cpu"
    assert ladder.Linear.from_quantized(weight)._where.type == "cpu"
