"""vLLM: the quantization method ``"ladder"``, and kernels for checkpoints that vLLM's own methods load.

vLLM finds `register` by the entry point ``vllm.general_plugins``. With ``quantization="ladder"`` it serves

* any model, quantized while it is loaded (options in ``hf_overrides={"quantization_config": {...}}``),
* what ``LadderConfig`` of transformers saved (linear layers),
* GPTQ checkpoints of 2, 3, 4 and 8 bits, ``desc_act`` included, which vLLM refuses.

Weights are cut by vLLM's own loaders; each rank packs its shard. Written for vLLM 0.33.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.model_executor.models.utils import WeightsMapper
from vllm.model_executor.parameter import (
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PackedColumnParameter,
    PackedvLLMParameter,
    RowvLLMParameter,
)
from vllm.model_executor.utils import set_weight_attrs

from ladder.api.grouped_linear import GroupedLinear, mixture
from ladder.api.linear import Linear
from ladder.api.quantization import quantize
from ladder.formats import gptq
from ladder.formats.layer import Held, Layer
from tile_types import QuantizedTensor
from tile_types.errors import CheckpointError, LadderError, ShapeError

METHOD = "ladder"
DEFAULTS: dict[str, Any] = {"weight": "int4", "group_size": 128}
"""How a model without a ``quantization_config`` is quantized."""

OURS = ("quant_method", "modules_to_not_convert", "online", "activation", "keep_canonical", "weight")
"""Entries of a configuration that are not options of `ladder.quantize`."""

ARRAYS = ("storage", "scale", "zero", "offset")
GPTQ = ("qweight", "qzeros", "scales", "g_idx")
"""Parameters of layers in canonical storage, and of GPTQ's."""

FLOATS = (torch.float16, torch.bfloat16)


class LadderQuantizationConfig(QuantizationConfig):  # type: ignore[misc]
    """How vLLM serves a model with Ladder.

    Parameters
    ----------
    config
        A ``quantization_config``: of `LadderConfig`, of a GPTQ checkpoint, or options of `ladder.quantize`
        with ``"online": True`` for a model that is quantized while it is loaded; by default `DEFAULTS`.
    """

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.config = {**DEFAULTS, "online": True} if config is None else dict(config)
        self.skipped = list(self.config.get("modules_to_not_convert") or [])
        self.form = "online" if self.config.get("online") else str(self.config.get("quant_method", METHOD))
        if self.form not in METHODS:
            raise CheckpointError(f"vLLM itself serves checkpoints of {self.form!r}, {METHOD!r} does not")

    @property
    def options(self) -> dict[str, Any]:
        """Options of `ladder.quantize`."""
        return {name: value for name, value in self.config.items() if name not in OURS}

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [*FLOATS, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> LadderQuantizationConfig:
        return cls(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Take GPTQ checkpoints where the user asks for us."""
        ours = user_quant == METHOD and str(hf_quant_cfg.get("quant_method", "")) in METHODS
        return METHOD if ours else None

    def get_checkpoint_weight_mapper(self) -> Any:
        """Return how names in a checkpoint become those of parameters."""
        if self.form == "gptq":
            return WeightsMapper(orig_to_new_suffix={} if self.config.get("desc_act") else {".g_idx": None})
        names: dict[str, str | None] = {f".weight.{name}": f".{name}" for name in ARRAYS}
        return WeightsMapper(orig_to_new_suffix={**names, ".weight.description": None})

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Return what serves a layer: None for what is not quantized."""
        is_linear, is_moe = isinstance(layer, LinearBase), isinstance(layer, RoutedExperts)
        if not (is_linear or is_moe):
            return None
        mapping = self.packed_modules_mapping
        if is_layer_skipped(prefix, self.skipped, mapping, match_mode="suffix"):
            return UnquantizedLinearMethod() if is_linear else None
        if is_linear:
            return METHODS[self.form](self, prefix)
        if self.form != "online":
            raise CheckpointError(f"{prefix}: stored quantized experts are not served by {METHOD!r} yet")
        return LadderMoEMethod(self, layer.moe_config)


class LadderLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """A linear layer on Ladder's kernels; a subclass says what is loaded and what it means."""

    def __init__(self, config: LadderQuantizationConfig, prefix: str) -> None:
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
        """Register the parameters that vLLM's loaders fill with this rank's shard."""
        loader = extra.pop("weight_loader")
        self.dtype, self.n, self.k = params_dtype, sum(output_partition_sizes), input_size_per_partition
        self.is_cut = input_size != input_size_per_partition
        for name, parameter in self.parameters(input_size, loader).items():
            layer.register_parameter(name, parameter)
            set_weight_attrs(parameter, extra)

    def parameters(self, input_size: int, loader: Any) -> dict[str, Any]:
        """Return the parameters of a shard ``[n, k]`` of a layer of so many inputs."""
        raise NotImplementedError

    def matrix(self, layer: torch.nn.Module) -> QuantizedTensor:
        """Return the shard from the loaded parameters."""
        raise NotImplementedError

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Pack the shard for the device that it is on, and drop what was loaded."""
        names = [name for name in (*ARRAYS, "weight", *GPTQ) if hasattr(layer, name)]
        where = getattr(layer, names[0]).device
        product = hold(self.matrix(layer), self.dtype, where, self.config)
        for name in names:
            delattr(layer, name)
        layer.product = product

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


def hold(matrix: QuantizedTensor, dtype: torch.dtype, where: torch.device, config: Any) -> Linear:
    """Return the layer of a shard; its canonical weight is not kept."""
    options = {"dtype": dtype, "device": where, "keep_canonical": bool(config.config.get("keep_canonical"))}
    return Linear.from_quantized(matrix, None, activation=config.config.get("activation"), **options)


@register_weight_loader_v2_supported_method
class LadderOnlineLinearMethod(LadderLinearMethod):
    """A layer that is loaded in 16 bits and quantized."""

    def parameters(self, input_size: int, loader: Any) -> dict[str, Any]:
        self.require_border(self.config.options.get("group_size") or 1)
        data = torch.empty(self.n, self.k, dtype=self.dtype)
        return {"weight": ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)}

    def matrix(self, layer: torch.nn.Module) -> QuantizedTensor:
        return quantized(layer.get_parameter("weight").data, self.config, self.prefix)


def quantized(weight: torch.Tensor, config: LadderQuantizationConfig, prefix: str) -> QuantizedTensor:
    """Quantize as a configuration says; errors name the layer."""
    try:
        found: QuantizedTensor = quantize(weight, config.config["weight"], **config.options)
    except LadderError as error:
        error.add_note(f"while quantizing {prefix}")
        raise
    return found


@register_weight_loader_v2_supported_method
class LadderStoredLinearMethod(LadderLinearMethod):
    """A layer in canonical storage: what ``LadderConfig`` of transformers saved."""

    def parameters(self, input_size: int, loader: Any) -> dict[str, Any]:
        # A layer of few outputs shows which arrays there are, of what types, and their extents along K.
        self.pattern = quantized(torch.ones(16, self.k, dtype=self.dtype), self.config, self.prefix)
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
        data = torch.empty(self.n, array.shape[1], dtype=dtype)
        if name == "storage":
            return ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)
        if per_row:
            return ChannelQuantScaleParameter(data=data, output_dim=0, weight_loader=loader)
        return GroupQuantScaleParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)

    def matrix(self, layer: torch.nn.Module) -> QuantizedTensor:
        arrays = {name: getattr(layer, name).data for name in ARRAYS if hasattr(layer, name)}
        kind = str(arrays["scale"].dtype).removeprefix("torch.") if "scale" in arrays else "none"
        kind = kind if kind == "float32" else self.pattern.scale_type
        return replace(self.pattern, shape=(self.n, self.k), scale_type=kind, **arrays)


class OrderParameter(RowvLLMParameter):  # type: ignore[misc]
    """``g_idx``: layers that are fused must have one order of columns."""

    def load_merged_column_weight(self, loaded_weight: torch.Tensor, **kwargs: Any) -> None:
        """Take the first one, compare the others."""
        if bool((self.data >= 0).all()) and not torch.equal(self.data.cpu(), loaded_weight.cpu()):
            raise CheckpointError("fused layers have different orders of columns (g_idx)")
        self.data.copy_(loaded_weight)

    load_qkv_weight = load_merged_column_weight


@register_weight_loader_v2_supported_method
class LadderGptqLinearMethod(LadderLinearMethod):
    """A layer of a GPTQ checkpoint, ``desc_act`` and 2, 3, 4 or 8 bits."""

    def parameters(self, input_size: int, loader: Any) -> dict[str, Any]:
        config = self.config.config
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
        made = {"qweight": PackedvLLMParameter(packed_dim=0, packed_factor=words, data=codes, **rows)}
        if whole:
            made["qzeros"] = PackedColumnParameter(**packed, **columns)
            made["scales"] = ChannelQuantScaleParameter(data=scales, **columns)
        else:
            made["qzeros"] = PackedvLLMParameter(**packed, **rows)
            made["scales"] = GroupQuantScaleParameter(data=scales, **rows)
        if ordered:
            order = torch.full((self.k,), -1, dtype=torch.int32)
            made["g_idx"] = OrderParameter(data=order, input_dim=0, weight_loader=loader)
        return made

    def matrix(self, layer: torch.nn.Module) -> QuantizedTensor:
        names = [name for name in GPTQ if hasattr(layer, name)]
        parts: Any = {f".{name}": Held(getattr(layer, name).data) for name in names}
        return gptq.read(Layer(self.prefix, parts, self.config.config))


METHODS: dict[str, Any] = {
    "online": LadderOnlineLinearMethod,
    METHOD: LadderStoredLinearMethod,
    "gptq": LadderGptqLinearMethod,
}
"""Form of a checkpoint -> what serves its linear layers."""


class LadderMoEMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """Experts that are loaded in 16 bits, quantized, and run as one `GroupedMatmul` per weight."""

    def __init__(self, config: LadderQuantizationConfig, moe: Any) -> None:
        super().__init__(moe)
        self.config = config

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
        group = self.config.options.get("group_size") or 1
        if size % group and size != self.moe.intermediate_size_per_partition * self.moe.tp_size:
            raise ShapeError(f"{size} columns of experts per rank end within a group of {group}")
        self.dtype, self.experts = params_dtype, num_experts
        shapes = {"w13_weight": (2 * size, hidden_size), "w2_weight": (hidden_size, size)}
        for name, shape in shapes.items():
            data = torch.empty(num_experts, *shape, dtype=params_dtype)
            parameter = torch.nn.Parameter(data, requires_grad=False)
            layer.register_parameter(name, parameter)
            set_weight_attrs(parameter, extra)

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:
        """Return None: none of vLLM's kernels is used."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Quantize and pack both weights, one after the other."""
        for name, home in (("w13_weight", "up"), ("w2_weight", "down")):
            weight = getattr(layer, name).data
            stack = quantized(weight.flatten(0, 1), self.config, name)
            options = {"dtype": self.dtype, "device": weight.device, "keep_canonical": False}
            setattr(layer, home, GroupedLinear.from_stack(stack, self.experts, **options))
            delattr(layer, name)

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: Any = None,
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts ``[T, H]``."""
        ids = topk_ids.long()
        if layer.expert_map is not None:  # experts of other ranks are -1 there
            ids = layer.expert_map[ids].long()
            ids = torch.where(ids < 0, self.experts, ids)
        return mixture(x, ids, topk_weights, layer.up, _gate(layer.activation), layer.down)


def _gate(activation: Any) -> Any:
    """Return the function of gates and ups that lie side by side."""
    name = getattr(activation, "value", activation)
    functions: dict[Any, Any] = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}
    if name not in functions:
        raise LadderError(f"experts with {name!r} are not served; known activations: {', '.join(functions)}")

    def gated(rows: torch.Tensor) -> torch.Tensor:
        gate, up = rows.chunk(2, -1)
        product: torch.Tensor = functions[name](gate) * up
        return product

    return gated


def register() -> None:
    """Register method and kernels; vLLM calls this in every process, perhaps more than once."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    if METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(METHOD)(LadderQuantizationConfig)
    from ladder.integrations.vllm_kernels import offer

    offer()
