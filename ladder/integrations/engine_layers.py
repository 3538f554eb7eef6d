"""Layers that engines fill with their own loaders: what vLLM and SGLang, whose interfaces are alike, share.

An engine's file adds its base classes, names its classes of parameters (`LinearLayer.kinds`) and registers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any, ClassVar, Self

import torch

from ladder.api.grouped_linear import GroupedLinear
from ladder.api.linear import Linear
from ladder.api.quantization import quantize
from ladder.api.saved_settings import METHOD
from ladder.formats import gptq
from ladder.formats.beside import require_no_transforms
from ladder.formats.layer import Layer, TensorInMemory
from ladder.runtime.compile import Request, obtain
from ladder.runtime.experts import single
from tile_types import QuantizedTensor
from tile_types.errors import CheckpointError, LadderError, ShapeError

DEFAULTS: dict[str, Any] = {"weight": "int4", "group_size": 128}
"""How a model without a ``quantization_config`` is quantized."""

NOT_OF_QUANTIZE = (
    *("quant_method", "modules_to_not_convert", "online", "activation", "keep_canonical", "weight"),
    *("packed_modules_mapping", "hf_config"),
)
"""Entries of a configuration that are not options of `ladder.quantize`."""

ARRAYS = ("storage", "scale", "zero", "offset")
GPTQ = ("qweight", "qzeros", "scales", "g_idx")
"""Parameters of layers in canonical storage, and of GPTQ's."""

FLOATS = (torch.float16, torch.bfloat16)


@cache
def _build(request: Request) -> None:
    obtain(request)


def build_ahead(layer: Linear, where: torch.device) -> Linear:
    """Find or build the kernels of a layer for every number of rows: nobody who is served waits for one."""
    request = layer._matmul.request.on(where)
    by_expert = request.gemm.experts and where.type == "cpu"
    _build(replace(request, gemm=single(request.gemm)) if by_expert else request)
    return layer


class Configuration:
    """How an engine serves a model with Ladder.

    config: A ``quantization_config``: of `LadderConfig`, of a GPTQ checkpoint, or options of
        `ladder.quantize` with ``"online": True`` for a model that is quantized while it is loaded; by default
        `DEFAULTS`.
    engine: Its name, for errors.
    forms: Names of the forms of checkpoints that are served.
    Raises CheckpointError if the form is none of these, or the configuration of another tool has what is not
        done here.
    """

    def __init__(self, config: dict[str, Any] | None, engine: str, forms: Mapping[str, Any]) -> None:
        self.config = {**DEFAULTS, "online": True} if config is None else dict(config)
        self.skipped = list(self.config.get("modules_to_not_convert") or [])
        self.form = "online" if self.config.get("online") else str(self.config.get("quant_method", METHOD))
        if self.form not in forms:
            raise CheckpointError(f"{engine} itself serves checkpoints of {self.form!r}, {METHOD!r} does not")
        if self.form not in ("online", METHOD):
            require_no_transforms(self.config)

    @property
    def options(self) -> dict[str, Any]:
        """Options of `ladder.quantize`."""
        return {name: value for name, value in self.config.items() if name not in NOT_OF_QUANTIZE}

    def quantized(self, weight: torch.Tensor, prefix: str) -> QuantizedTensor:
        """Quantize as the configuration says; errors name the layer."""
        try:
            found: QuantizedTensor = quantize(weight, self.config["weight"], **self.options)
        except LadderError as error:
            error.add_note(f"while quantizing {prefix}")
            raise
        return found

    def hold(self, matrix: QuantizedTensor, dtype: torch.dtype, where: torch.device) -> Linear:
        """Return the layer of a shard; its canonical weight is not kept unless the user says so.

        GPTQModel's ``activation``, a dictionary, tells how its own kernels quantize inputs, which stay here.
        """
        named = self.config.get("activation")
        return Linear.from_quantized(
            matrix,
            None,
            dtype=dtype,
            device=where,
            activation=None if isinstance(named, dict) else named,
            keep_canonical=bool(self.config.get("keep_canonical")),
        )


class EngineConfig:
    """What an engine asks of a quantization method; a subclass adds the engine's base class.

    config: As of `Configuration`.
    """

    engine: ClassVar[str]
    """The engine's name, for errors."""

    methods: ClassVar[Mapping[str, Any]]
    """Form of a checkpoint -> the class that serves its linear layers."""

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.settings = Configuration(config, self.engine, self.methods)

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [*FLOATS, torch.float32]

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        return cls(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Take GPTQ checkpoints where the user asks for us."""
        ours = user_quant == METHOD and str(hf_quant_cfg.get("quant_method", "")) in cls.methods
        return METHOD if ours else None

    def linear_method(self, prefix: str) -> Any:
        """Return what serves a linear layer."""
        return self.methods[self.settings.form](self, prefix)

    def require_online(self, prefix: str) -> None:
        """Raise CheckpointError for experts that are stored in quantized form."""
        if self.settings.form != "online":
            raise CheckpointError(f"{prefix}: stored quantized experts are not served by {METHOD!r} yet")


def with_attributes(parameter: torch.nn.Parameter, attributes: Mapping[str, Any]) -> torch.nn.Parameter:
    """Set attributes of a parameter: engines' loaders read them."""
    for name, value in attributes.items():
        setattr(parameter, name, value)
    return parameter


class LinearLayer:
    """A linear layer on Ladder's kernels; a subclass says what is loaded and what it means."""

    kinds: ClassVar[Any]
    """The engine's module of classes of parameters."""

    home = ""
    """Name of a module in the layer that holds the parameters, for engines that keep names of checkpoints."""

    def __init__(self, config: Any, prefix: str) -> None:
        self.settings: Configuration = config.settings
        self.config, self.prefix = config, prefix

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Register the parameters that the engine's loaders fill with this rank's shard."""
        loader = extra.pop("weight_loader")
        self.dtype, self.n, self.k = params_dtype, sum(output_partition_sizes), input_size_per_partition
        self.is_cut = input_size != input_size_per_partition
        if self.home:
            layer.add_module(self.home, torch.nn.Module())
        for name, parameter in self.parameters(input_size, loader).items():
            layer.get_submodule(self.home).register_parameter(name, with_attributes(parameter, extra))

    def parameters(self, input_size: int, loader: Any) -> dict[str, Any]:
        """Return the parameters of a shard ``[n, k]`` of a layer of so many inputs."""
        raise NotImplementedError

    def matrix(self, arrays: dict[str, torch.Tensor]) -> QuantizedTensor:
        """Return the shard from what was loaded, by name of the parameter."""
        raise NotImplementedError

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Pack the shard for the device that it is on, and drop what was loaded."""
        holder = layer.get_submodule(self.home)
        loaded = {name: getattr(holder, name) for name in self.names if hasattr(holder, name)}
        arrays = {name: parameter.data for name, parameter in loaded.items()}
        where = next(iter(arrays.values())).device
        product = build_ahead(self.settings.hold(self.matrix(arrays), self.dtype, where), where)
        for name in loaded if not self.home else ():
            delattr(holder, name)
        if self.home:
            delattr(layer, self.home)
        layer.product = product

    names: ClassVar[tuple[str, ...]] = ("weight",)
    """Names that parameters may have."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``[..., n]``."""
        y: torch.Tensor = layer.product(x)
        return y if bias is None else y + bias

    def require_border(self, group: int, unit: int = 1) -> None:
        """Raise unless a cut along K lies on the border of a group, and of a unit of storage."""
        if self.is_cut and (self.k % group or self.k % unit):
            raise ShapeError(
                f"{self.prefix}: {self.k} inputs per rank end within a group of {group}"
                f" or a word of {unit} codes: use fewer ranks"
            )


class OnlineLayer(LinearLayer):
    """A layer that is loaded in 16 bits and quantized."""

    def parameters(self, input_size: int, loader: Any) -> dict[str, Any]:
        self.require_border(self.settings.options.get("group_size") or 1)
        return {"weight": self.whole(torch.empty(self.n, self.k, dtype=self.dtype), loader)}

    def whole(self, data: torch.Tensor, loader: Any) -> Any:
        """Return the parameter of a weight that is not quantized."""
        return self.kinds.ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)

    def matrix(self, arrays: dict[str, torch.Tensor]) -> QuantizedTensor:
        return self.settings.quantized(arrays["weight"], self.prefix)


class StoredLayer(LinearLayer):
    """A layer in canonical storage: what ``LadderConfig`` of transformers saved."""

    names = ARRAYS

    def parameters(self, input_size: int, loader: Any) -> dict[str, Any]:
        # A layer of few outputs shows which arrays there are, of what types, and their extents along K.
        self.pattern = self.settings.quantized(torch.ones(16, self.k, dtype=self.dtype), self.prefix)
        block, bits = self.pattern.block, self.pattern.ttype.elem_bits
        if block[0] != 1 or self.pattern.tensor_scale is not None:
            raise CheckpointError(f"{self.prefix}: one scale for several outputs is not served yet")
        per_unit = max(1, 8 // bits) if 32 % bits == 0 else 32 // bits
        per_row = block[1] >= self.k
        self.require_border(1 if per_row else block[1], per_unit)
        found = {name: getattr(self.pattern, name) for name in ARRAYS}
        arrays = {name: array for name, array in found.items() if array is not None}
        return {name: self._parameter(name, array, per_row, loader) for name, array in arrays.items()}

    def _parameter(self, name: str, array: torch.Tensor, per_row: bool, loader: Any) -> Any:
        # Scales of any 16-bit type are held in float32, which loses nothing.
        dtype = torch.float32 if array.dtype in FLOATS else array.dtype
        data, kinds = torch.empty(self.n, array.shape[1], dtype=dtype), self.kinds
        if name == "storage":
            return kinds.ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)
        if per_row:
            return kinds.ChannelQuantScaleParameter(data=data, output_dim=0, weight_loader=loader)
        return kinds.GroupQuantScaleParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)

    def matrix(self, arrays: dict[str, torch.Tensor]) -> QuantizedTensor:
        kind = str(arrays["scale"].dtype).removeprefix("torch.") if "scale" in arrays else "none"
        kind = kind if kind == "float32" else self.pattern.scale_type
        fields: dict[str, Any] = {**arrays}
        return replace(self.pattern, shape=(self.n, self.k), scale_type=kind, **fields)


class OneOrder:
    """How ``g_idx`` is loaded into fused layers: they must have one order of columns."""

    data: torch.Tensor

    def load_merged_column_weight(self, loaded_weight: torch.Tensor, **kwargs: Any) -> None:
        """Take the first one, compare the others."""
        if bool((self.data >= 0).all()) and not torch.equal(self.data.cpu(), loaded_weight.cpu()):
            raise CheckpointError("fused layers have different orders of columns (g_idx)")
        self.data.copy_(loaded_weight)

    load_qkv_weight = load_merged_column_weight


class GptqLayer(LinearLayer):
    """A layer of a GPTQ checkpoint, ``desc_act`` and 2, 3, 4 or 8 bits."""

    names = GPTQ
    order: ClassVar[Any]
    """The engine's parameter cut along inputs, with `OneOrder`."""

    keeps_order = False
    """Whether the engine's loaders want ``g_idx`` also where it says nothing."""

    def parameters(self, input_size: int, loader: Any) -> dict[str, Any]:
        config, kinds = self.settings.config, self.kinds
        bits, ordered = int(config["bits"]), bool(config.get("desc_act"))
        group = input_size if config.get("group_size", -1) in (-1, None) else int(config["group_size"])
        whole = ordered or group >= input_size  # every rank needs all groups
        words = Fraction(32, bits)
        self.require_border(1 if whole else group, (32 // bits) if 32 % bits == 0 else 32)
        if self.n * bits % 32:
            raise ShapeError(f"{self.prefix}: {self.n} outputs per rank end within a word of zero points")
        groups = -(-(input_size if whole else self.k) // group)
        rows = {"input_dim": 0, "output_dim": 1, "weight_loader": loader}
        columns = {"output_dim": 1, "weight_loader": loader}
        zeros = torch.empty(groups, self.n * bits // 32, dtype=torch.int32)
        packed = {"packed_dim": 1, "packed_factor": words, "data": zeros}
        codes = torch.empty(self.k * bits // 32, self.n, dtype=torch.int32)
        scales = torch.empty(groups, self.n, dtype=torch.float32)
        made = {"qweight": kinds.PackedvLLMParameter(packed_dim=0, packed_factor=words, data=codes, **rows)}
        if whole:
            made["qzeros"] = kinds.PackedColumnParameter(**packed, **columns)
            made["scales"] = kinds.ChannelQuantScaleParameter(data=scales, **columns)
        else:
            made["qzeros"] = kinds.PackedvLLMParameter(**packed, **rows)
            made["scales"] = kinds.GroupQuantScaleParameter(data=scales, **rows)
        if ordered or self.keeps_order:
            order = torch.full((self.k,), -1, dtype=torch.int32)
            made["g_idx"] = self.order(data=order, input_dim=0, weight_loader=loader)
        return made

    def matrix(self, arrays: dict[str, torch.Tensor]) -> QuantizedTensor:
        ordered = bool(self.settings.config.get("desc_act"))
        parts: Any = {
            f".{name}": TensorInMemory(array) for name, array in arrays.items() if name != "g_idx" or ordered
        }
        skipped = {"group_size"} if ordered else set()  # a rank's columns may be of all groups
        config = {name: value for name, value in self.settings.config.items() if name not in skipped}
        return gptq.read(Layer(self.prefix, parts, config))


class ExpertsLayer:
    """Experts that are loaded in 16 bits, quantized, and run as one `GroupedMatmul` per weight."""

    settings: Configuration

    def columns(self, layer: torch.nn.Module, size: int) -> int:
        """Return the columns of the experts' first weights on all ranks; ``size`` of them are on this one."""
        raise NotImplementedError

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Register ``w13_weight`` [E, 2I, H] and ``w2_weight`` [E, H, I] of this rank's shard."""
        size = intermediate_size_per_partition
        self.require_border(size, self.columns(layer, size))
        self.dtype, self.experts = params_dtype, num_experts
        for name, shape in {"w13_weight": (2 * size, hidden_size), "w2_weight": (hidden_size, size)}.items():
            data = torch.empty(num_experts, *shape, dtype=params_dtype)
            parameter = torch.nn.Parameter(data, requires_grad=False)
            layer.register_parameter(name, with_attributes(parameter, extra))

    def require_border(self, size: int, whole: int) -> None:
        """Raise unless a cut of the experts' columns lies on the border of a group."""
        group = self.settings.options.get("group_size") or 1
        if size % group and size != whole:
            raise ShapeError(f"{size} columns of experts per rank end within a group of {group}")

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Quantize and pack both weights, one after the other."""
        for name, home in (("w13_weight", "up"), ("w2_weight", "down")):
            weight = getattr(layer, name).data
            stack = self.settings.quantized(weight.flatten(0, 1), name)
            options = {"dtype": self.dtype, "device": weight.device, "keep_canonical": False}
            product = GroupedLinear.from_stack(stack, self.experts, **options)
            setattr(layer, home, build_ahead(product, weight.device))
            delattr(layer, name)


def gate_of(activation: Any) -> Any:
    """Return the function of gates and ups that lie side by side.

    Raises LadderError if it is none that is served.
    """
    name = getattr(activation, "value", activation)
    functions: dict[Any, Any] = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}
    if name not in functions:
        raise LadderError(f"experts with {name!r} are not served; known activations: {', '.join(functions)}")

    def gated(rows: torch.Tensor) -> torch.Tensor:
        gate, up = rows.chunk(2, -1)
        product: torch.Tensor = functions[name](gate) * up
        return product

    return gated
