"""SGLang: the quantization method ``"ladder"``.

SGLang finds `register` by the entry point ``sglang.srt.plugins``. With ``--quantization ladder`` it serves

* any model, quantized while it is loaded,
* what ``LadderConfig`` of transformers saved (linear layers),
* GPTQ checkpoints of 2, 3, 4 and 8 bits, ``desc_act`` included.

Weights are cut by SGLang's own loaders; each rank packs its shard. Written for SGLang 0.5.23.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.arg_groups.choices import QUANTIZATION_CHOICES, add_quantization_method_choices
from sglang.srt.layers import parameter as kinds
from sglang.srt.layers.linear import WEIGHT_LOADER_V2_SUPPORTED, LinearBase
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.quantization import BASE_QUANTIZATION_METHODS, QUANTIZATION_METHODS
from sglang.srt.layers.quantization.base_config import (
    FusedMoEMethodBase,
    LinearMethodBase,
    QuantizationConfig,
)
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod
from sglang.srt.layers.quantization.utils import is_layer_skipped

from ladder.api.grouped_linear import mixture
from ladder.api.saved_settings import METHOD
from ladder.integrations.engine_layers import (
    EngineConfig,
    ExpertsLayer,
    GptqLayer,
    OneOrder,
    OnlineLayer,
    StoredLayer,
    gate_of,
    with_attributes,
)
from tile_types.errors import LadderError

PLAIN = {
    "is_gated": True,
    "apply_router_weight_on_input": False,
    "no_combine": False,
    "gemm1_alpha": None,
    "gemm1_beta": None,
    "gemm1_clamp_limit": None,
    "swiglu_limit": None,
}
"""Fields of SGLang's ``MoeRunnerConfig`` -> the value with which experts are served."""


class LadderOnlineLinearMethod(OnlineLayer, LinearMethodBase):  # type: ignore[misc]
    """A layer that is loaded in 16 bits and quantized."""

    kinds = kinds

    def whole(self, data: torch.Tensor, loader: Any) -> Any:
        """Return a parameter for SGLang's first loader, which converts types as for its own layers."""
        parameter = torch.nn.Parameter(data, requires_grad=False)
        return with_attributes(parameter, {"input_dim": 1, "output_dim": 0, "weight_loader": loader})


class LadderStoredLinearMethod(StoredLayer, LinearMethodBase):  # type: ignore[misc]
    """A layer in canonical storage: what ``LadderConfig`` of transformers saved."""

    kinds = kinds
    home = "weight"  # SGLang finds parameters by the names of the checkpoint

    def parameters(self, input_size: int, loader: Any) -> dict[str, Any]:
        """Return those of the arrays, and one for the description, which is not kept."""
        none = torch.nn.Parameter(torch.empty(0, dtype=torch.uint8), requires_grad=False)
        passed = with_attributes(none, {"weight_loader": lambda *_: None})
        return {**super().parameters(input_size, loader), "description": passed}


class OrderParameter(OneOrder, kinds.RowvLLMParameter):  # type: ignore[misc]
    """``g_idx``."""


class LadderGptqLinearMethod(GptqLayer, LinearMethodBase):  # type: ignore[misc]
    """A layer of a GPTQ checkpoint, ``desc_act`` and 2, 3, 4 or 8 bits."""

    kinds = kinds
    order = OrderParameter
    keeps_order = True


METHODS: dict[str, Any] = {
    "online": LadderOnlineLinearMethod,
    METHOD: LadderStoredLinearMethod,
    "gptq": LadderGptqLinearMethod,
}
"""Form of a checkpoint -> what serves its linear layers."""


class LadderMoEMethod(ExpertsLayer, FusedMoEMethodBase):  # type: ignore[misc]
    """Experts that are loaded in 16 bits, quantized, and run as one `GroupedMatmul` per weight."""

    def __init__(self, config: EngineConfig) -> None:
        self.settings = config.settings

    def columns(self, layer: torch.nn.Module, size: int) -> int:
        return size * int(getattr(layer, "moe_tp_size", 1))

    def create_moe_runner(self, layer: torch.nn.Module, moe_runner_config: Any) -> None:
        """Check that these experts are of the kind that is served.

        Raises LadderError if they scale, clamp or combine in a way of their own.
        """
        other = [name for name, value in PLAIN.items() if getattr(moe_runner_config, name) != value]
        if other or moe_runner_config.routed_scaling_factor not in (None, 1.0):
            other = other or ["routed_scaling_factor"]
            raise LadderError(f"experts with {', '.join(other)} are not served by {METHOD!r} yet")
        self.gate = gate_of(moe_runner_config.activation)

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        """Return the weighted sum of each token's experts ``[T, H]``; experts of other ranks are -1."""
        weights, ids, _ = dispatch_output.topk_output
        x = dispatch_output.hidden_states
        return StandardCombineInput(mixture(x, ids.long(), weights, layer.up, self.gate, layer.down))


class LadderQuantizationConfig(EngineConfig, QuantizationConfig):  # type: ignore[misc]
    """How SGLang serves a model with Ladder; see `EngineConfig`."""

    engine = "SGLang"
    methods = METHODS

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        super().__init__(config)
        self.packed_modules_mapping = (config or {}).get("packed_modules_mapping") or {}

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    def get_scaled_act_names(self) -> list[str]:
        return []

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Return what serves a layer: None for what is not quantized."""
        is_linear, is_moe = isinstance(layer, LinearBase), isinstance(layer, FusedMoE)
        if not (is_linear or is_moe):
            return None
        if is_layer_skipped(prefix, self.settings.skipped, self.packed_modules_mapping):
            return UnquantizedLinearMethod() if is_linear else UnquantizedFusedMoEMethod()
        if is_linear:
            return self.linear_method(prefix)
        self.require_online(prefix)
        return LadderMoEMethod(self)


def register() -> None:
    """Register the method; SGLang calls this in every process, perhaps more than once."""
    for method in (LadderStoredLinearMethod, LadderGptqLinearMethod):
        if method.__name__ not in WEIGHT_LOADER_V2_SUPPORTED:
            WEIGHT_LOADER_V2_SUPPORTED.append(method.__name__)
    BASE_QUANTIZATION_METHODS[METHOD] = QUANTIZATION_METHODS[METHOD] = LadderQuantizationConfig
    if METHOD not in QUANTIZATION_CHOICES:
        add_quantization_method_choices([METHOD])
