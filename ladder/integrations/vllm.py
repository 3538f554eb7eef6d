"""vLLM: the quantization method ``"ladder"``, and kernels for checkpoints that vLLM's own methods load.

vLLM finds `register` by the entry point ``vllm.general_plugins``. With ``quantization="ladder"`` it serves

* any model, quantized while it is loaded (options in ``hf_overrides={"quantization_config": {...}}``),
* what ``LadderConfig`` of transformers saved (linear layers),
* GPTQ checkpoints of 2, 3, 4 and 8 bits, ``desc_act`` included, which vLLM refuses.

Weights are cut by vLLM's own loaders; each rank packs its shard. Written for vLLM 0.33.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor import parameter as kinds
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

from ladder.api.grouped_linear import mixture
from ladder.integrations.engine_layers import (
    ARRAYS,
    FLOATS,
    Configuration,
    ExpertsLayer,
    GptqLayer,
    OneOrder,
    OnlineLayer,
    StoredLayer,
    gate_of,
)
from ladder.integrations.loading import METHOD
from tile_types.errors import CheckpointError


class LadderQuantizationConfig(QuantizationConfig):  # type: ignore[misc]
    """How vLLM serves a model with Ladder; see `Configuration`."""

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.settings = Configuration(config, "vLLM", METHODS)

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
        if self.settings.form == "gptq":
            ordered = self.settings.config.get("desc_act")
            return WeightsMapper(orig_to_new_suffix={} if ordered else {".g_idx": None})
        names: dict[str, str | None] = {f".weight.{name}": f".{name}" for name in ARRAYS}
        return WeightsMapper(orig_to_new_suffix={**names, ".weight.description": None})

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Return what serves a layer: None for what is not quantized."""
        is_linear, is_moe = isinstance(layer, LinearBase), isinstance(layer, RoutedExperts)
        if not (is_linear or is_moe):
            return None
        settings, mapping = self.settings, self.packed_modules_mapping
        if is_layer_skipped(prefix, settings.skipped, mapping, match_mode="suffix"):
            return UnquantizedLinearMethod() if is_linear else None
        if is_linear:
            return METHODS[settings.form](self, prefix)
        if settings.form != "online":
            raise CheckpointError(f"{prefix}: stored quantized experts are not served by {METHOD!r} yet")
        return LadderMoEMethod(self, layer.moe_config)


@register_weight_loader_v2_supported_method
class LadderOnlineLinearMethod(OnlineLayer, LinearMethodBase):  # type: ignore[misc]
    """A layer that is loaded in 16 bits and quantized."""

    kinds = kinds


@register_weight_loader_v2_supported_method
class LadderStoredLinearMethod(StoredLayer, LinearMethodBase):  # type: ignore[misc]
    """A layer in canonical storage: what ``LadderConfig`` of transformers saved."""

    kinds = kinds


class OrderParameter(OneOrder, kinds.RowvLLMParameter):  # type: ignore[misc]
    """``g_idx``."""


@register_weight_loader_v2_supported_method
class LadderGptqLinearMethod(GptqLayer, LinearMethodBase):  # type: ignore[misc]
    """A layer of a GPTQ checkpoint, ``desc_act`` and 2, 3, 4 or 8 bits."""

    kinds = kinds
    order = OrderParameter


METHODS: dict[str, Any] = {
    "online": LadderOnlineLinearMethod,
    METHOD: LadderStoredLinearMethod,
    "gptq": LadderGptqLinearMethod,
}
"""Form of a checkpoint -> what serves its linear layers."""


class LadderMoEMethod(ExpertsLayer, FusedMoEMethodBase):  # type: ignore[misc]
    """Experts that are loaded in 16 bits, quantized, and run as one `GroupedMatmul` per weight."""

    def __init__(self, config: LadderQuantizationConfig, moe: Any) -> None:
        FusedMoEMethodBase.__init__(self, moe)
        self.settings = config.settings

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Register this rank's shard of the weights."""
        size = intermediate_size_per_partition
        self.require_border(size, self.moe.intermediate_size_per_partition * self.moe.tp_size)
        self.register(layer, num_experts, hidden_size, size, params_dtype, extra)

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:
        """Return None: none of vLLM's kernels is used."""

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
        return mixture(x, ids, topk_weights, layer.up, gate_of(layer.activation), layer.down)


def register() -> None:
    """Register method and kernels; vLLM calls this in every process, perhaps more than once."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    if METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(METHOD)(LadderQuantizationConfig)
    from ladder.integrations.vllm_kernels import offer

    offer()
