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
from ladder.api.saved_settings import METHOD
from ladder.integrations.engine_layers import (
    ARRAYS,
    EngineConfig,
    ExpertsLayer,
    GptqLayer,
    OneOrder,
    OnlineLayer,
    StoredLayer,
    gate_of,
)


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

    def __init__(self, config: EngineConfig, moe: Any) -> None:
        FusedMoEMethodBase.__init__(self, moe)
        self.settings = config.settings

    def columns(self, layer: torch.nn.Module, size: int) -> int:
        return int(self.moe.intermediate_size_per_partition * self.moe.tp_size)

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
        return mixture(x, ids, topk_weights, layer.up, gate_of(layer.activation), layer.down)


class LadderQuantizationConfig(EngineConfig, QuantizationConfig):  # type: ignore[misc]
    """How vLLM serves a model with Ladder; see `EngineConfig`."""

    engine = "vLLM"
    methods = METHODS

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

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
        mapping = self.packed_modules_mapping
        if is_layer_skipped(prefix, self.settings.skipped, mapping, match_mode="suffix"):
            return UnquantizedLinearMethod() if is_linear else None
        if is_linear:
            return self.linear_method(prefix)
        self.require_online(prefix)
        return LadderMoEMethod(self, layer.moe_config)


def register() -> None:
    """Register method and kernels; vLLM calls this in every process, perhaps more than once."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    if METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(METHOD)(LadderQuantizationConfig)
    from ladder.integrations.vllm_kernels import offer

    offer()
