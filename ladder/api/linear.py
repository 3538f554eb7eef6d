"""`Linear`: a quantized drop-in for ``torch.nn.Linear``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ladder.api.calibration import Moments, quantized_matrix
from ladder.api.linear_modules import (
    NOT_KEPT,
    NOT_SET,
    bias_shard,
    device_beside_cpu,
    form_of,
    matrix_and_bias,
    on_mesh,
    on_meta,
    require_parts,
)
from ladder.api.matmul import Matmul
from ladder.api.problem import gemm_for
from ladder.api.scaled import is_scaled
from ladder.api.scaled_linear import ScaledLinear
from ladder.api.stored_weight import TYPES, Stored, StoredWeight, dequantize
from ladder.api.weight_state import PACKED, WEIGHT, copied, keys_of, load, state_of, state_of_packed
from ladder.ir.gemm import Gemm
from ladder.runtime.compile import Request
from ladder.runtime.operator import autocast_type, is_captured, is_recorded
from ladder.runtime.packed import PackedWeight
from ladder.runtime.recovered_weight import Recovery, recovery
from ladder.runtime.tokens import EIGHT_BIT
from tile_types import QuantizedTensor, get_type
from tile_types.arrays import as_torch
from tile_types.errors import ArtifactError, DeviceError, DTypeError, LadderError, require_kind
from tile_types.quantized import owned
from tile_types.shards import shard

LINEAR_OPTIONS = ("activation", "keep_canonical", "batch_invariant")
"""Options of layers that do not say how a weight is quantized."""


class Linear(NonDynamicallyQuantizableLinear):
    """``y = x · Wᵀ + b`` with W in a low-bit type.

    The weight is packed for the device that the module is on; moving the module repacks it.
    ``state_dict`` holds the weight in canonical storage, the same for all devices. It is kept
    in host memory for that, unless ``keep_canonical=False``: then ``state_dict`` holds the
    packed arrays, and the module stays on its family of devices.

    Parameters
    ----------
    in_features, out_features
        K and N.
    bias
        Whether there is a bias.
    weight
        Type of the weights, or its name.
    group_size, zero
        As in `ladder.quantize`.
    activation
        Type that the product is computed in; by default the module's dtype. For ``"int8"`` and
        ``"fp8_*"`` each row of x is quantized on the fly.
    dtype, device
        Of the inputs, the outputs and the bias; as in ``torch.nn.Linear``.
    keep_canonical
        Whether to keep the canonical weight after packing.
    batch_invariant
        As in `Matmul`.

    Raises
    ------
    LadderError
        If the types do not go together; see `Matmul`.

    Notes
    -----
    A module built by the constructor has no weight until ``load_state_dict`` or `set_weight`.

    Its base is the linear layer of torch that tools which quantize pass over; those that adapt linear layers
    (PEFT) take it as one.
    """

    bias: torch.nn.Parameter | None  # type: ignore[assignment]
    columns: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        weight: str = "int4",
        group_size: int | None = None,
        zero: str | None = None,
        activation: str | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        keep_canonical: bool = True,
        batch_invariant: bool = False,
    ) -> None:
        torch.nn.Module.__init__(self)  # torch's own would make a dense weight
        self.in_features, self.out_features = in_features, out_features
        self.keep_canonical, self.batch_invariant = keep_canonical, batch_invariant
        self._options = {"weight": weight, "group_size": group_size, "zero": zero}
        require_kind(activation, (str, type(None)), "activation is the name of a type or None")
        require_kind(dtype, (torch.dtype, type(None)), "dtype of a layer is one of torch's, or None")
        self._activation = activation
        self._where = torch.empty(0, device=device).device
        self._keep(None)
        self._recovery: Recovery | None = None
        self._packed: PackedWeight | None = None
        self._names: tuple[str, ...] = ()
        self.register_buffer("columns", None, persistent=False)
        self._reorders = False
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        self._matmul = self._operator(self.dtype, bias)
        vector = torch.zeros(out_features, dtype=self.dtype, device=self._where) if bias else None
        self.bias = None if vector is None else torch.nn.Parameter(vector, requires_grad=False)

    @classmethod
    def from_linear(
        cls,
        linear: torch.nn.Module,
        weight: str = "int4",
        *,
        group_size: int | None = None,
        zero: str | None = None,
        activation: str | None = None,
        keep_canonical: bool = True,
        batch_invariant: bool = False,
        clip: bool = False,
        moments: Moments | None = None,
        **options: Any,
    ) -> Linear:
        """Quantize a linear layer; it is left as it is.

        Parameters
        ----------
        linear
            The layer, or transformers' `Conv1D`: float16, bfloat16 or float32, on any device.
        weight, group_size, zero, activation, keep_canonical, batch_invariant
            See the class.
        clip
            Whether to clip each group of weights first where its quantization errs least (`clipped`).
        moments
            Of example inputs: scales and codes are chosen by them (`calibrated`), which clips as well.
        **options
            More for `ladder.quantize`: ``scaling``, ``scale_type``, ``block``.

        Raises
        ------
        LadderError
            If it is no linear layer, or the weight cannot be quantized so (NaN: its position is named).
        """
        options |= {"group_size": group_size, "zero": zero}
        matrix, bias = matrix_and_bias(linear)
        return cls.from_quantized(
            quantized_matrix(matrix, weight, clip=clip, moments=moments, **options),
            bias,
            dtype=matrix.dtype,
            device=matrix.device,
            activation=activation,
            keep_canonical=keep_canonical,
            batch_invariant=batch_invariant,
        )

    @classmethod
    def from_quantized(
        cls, weight: QuantizedTensor, bias: torch.Tensor | None = None, **options: Any
    ) -> Linear:
        """Build a layer around a quantized weight ``[N, K]``; ``options`` as in the constructor.

        Where the activation is a block type, this is a `ladder.api.scaled_linear.ScaledLinear`. Without
        ``device`` a weight on a GPU makes a layer there. An offset becomes real zero points
        (`QuantizedTensor.without_offset`), an order of columns a gather of the inputs.
        """
        require_parts(weight, bias)
        options.setdefault("device", device_beside_cpu(weight))
        if is_scaled(options.get("activation")):
            given = {name: value for name, value in options.items() if name not in ("group_size", "zero")}
            return cast("Linear", ScaledLinear(weight, bias, **given))
        n, k = weight.shape
        module = cls(k, n, bias is not None, **form_of(weight), **options)
        module._fill(weight, bias)
        return module

    def _fill(self, weight: QuantizedTensor, bias: torch.Tensor | None) -> None:
        self.set_weight(weight)
        if bias is not None and self.bias is not None:
            self.bias.data.copy_(bias.detach())

    def set_weight(self, weight: QuantizedTensor) -> None:
        """Take a quantized weight and pack it for the module's device.

        Raises ShapeError if it is not what the module was built for.
        """
        self._recovery = None
        if self._where.type == "meta":
            self._keep(weight)
            return
        order, packed = weight.columns, self._pack(weight)
        self._recovery = recovery(packed, weight) if self.keep_canonical else None
        self._keep(weight if self.keep_canonical and self._recovery is None else None)
        self._set_packed(packed)
        self._set_columns(None if order is None else as_torch(order))

    def _pack(self, weight: QuantizedTensor) -> PackedWeight:
        """Pack a weight, its columns as stored, where the layer lies."""
        return self._matmul.pack(replace(weight, columns=None).to(self._where), self._where)

    def shard(self, axis: int, index: int, count: int, parts: Sequence[int] | None = None) -> None:
        """Keep what device ``index`` of ``count`` holds of the layer: its outputs (axis 0) or its inputs (1).

        Of inputs, each device computes a summand of the result, and the first adds the bias.

        Parameters
        ----------
        axis, index, count, parts
            As in `tile_types.shards.shard`.

        Raises
        ------
        LadderError
            If the canonical weight was not kept.
        ShapeError
            If the weight cannot be cut so.
        """
        whole = self.canonical
        if whole is None:
            raise LadderError("only a canonical weight can be cut: build the module with keep_canonical=True")
        weight = shard(whole, axis, index, count, parts)
        self._resize(weight, bias_shard(self.bias, axis, index, count, parts))

    def _resize(self, weight: QuantizedTensor, bias: torch.Tensor | None) -> None:
        """Become the layer of another weight of the same type."""
        self.out_features, self.in_features = weight.shape
        width = min(weight.block[1], self.in_features)
        self._options["group_size"] = width
        self.bias = None if bias is None else torch.nn.Parameter(bias.detach().clone(), requires_grad=False)
        self._matmul = self._operator(self.dtype)
        self.set_weight(weight)

    @property
    def canonical(self) -> QuantizedTensor | None:
        """The weight in canonical storage, if it was kept; where the packed one gives it, it is computed."""
        return self._recovered(self._packed)

    def _recovered(self, packed: PackedWeight | None) -> QuantizedTensor | None:
        if packed is None:
            return self._canonical
        whole = self._canonical if self._recovery is None else self._recovery.weight(packed)
        written = packed.is_written and whole is not None  # over by those of another process, it may be
        return None if written and not packed.equals(self._pack(whole)) else whole  # type: ignore[arg-type]

    def keep_own(self, is_foreign: Callable[[torch.Tensor], bool]) -> None:
        """Copy those arrays of the canonical weight that lie in memory of others, such as a mapped file."""
        if self._canonical is not None:
            self._keep(owned(self._canonical, is_foreign))
        if self._recovery is not None:
            self._recovery = self._recovery.with_own(is_foreign)

    @property
    def weight(self) -> torch.Tensor:
        """The dequantized weight ``[N, K]``, for code that reads it instead of calling the layer.

        It knows its type, shape and device; values are computed from the canonical weight where they are
        needed, for each access anew (`StoredWeight`).

        Raises AttributeError if that was not kept.
        """
        traced = torch.compiler.is_compiling() or is_captured()
        if (self._stored is None and self._recovery is None) or not (traced or self._is_known()):
            raise AttributeError("no canonical weight is kept: build the module with keep_canonical=True")
        if traced:
            if self._stored is None:  # graphs hold its arrays
                whole, self._recovery = self.canonical, None
                self._keep(whole)
            kept = cast("Stored", self._stored)
            return dequantize(kept.arrays, kept.description, self.dtype, self._where)
        shape = self.out_features, self.in_features
        values, packed = partial(self._values, self._packed), partial(self._recovered, self._packed)
        return StoredWeight(shape, self.dtype, self._where, values, packed)

    @weight.setter
    def weight(self, given: Any) -> None:
        raise LadderError(NOT_SET)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Add a parameter, as ``layer.name = parameter`` does.

        The weight that torch's `RowwiseParallel` has spread over a mesh is left out: see `on_mesh`.

        Raises LadderError if it would be another weight.
        """
        if name == "weight" and hasattr(param, "device_mesh"):
            return
        if name == "weight" or isinstance(param, StoredWeight):  # torch.nn.utils.prune names it weight_orig
            raise LadderError(NOT_SET)
        super().register_parameter(name, param)

    def _values(self, packed: PackedWeight | None) -> torch.Tensor:
        """Return the dequantized weight."""
        kept = self._stored or Stored.of(cast("QuantizedTensor", self._recovered(packed)))
        return dequantize(*kept, self.dtype, self._where)

    @property
    def factor(self) -> QuantizedTensor | None:
        """The canonical weight as the product has it: columns as stored, zero points for an offset."""
        kept = self.canonical
        return None if kept is None else replace(kept, columns=None).without_offset()

    @property
    def problem(self) -> Gemm:
        """The product that it computes, in normal form."""
        return self._matmul.gemm

    @property
    def weight_nbytes(self) -> int:
        """Bytes of the weight as kernels read it."""
        return self._packed.nbytes if self._packed is not None else 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``[..., out_features]`` for ``[..., in_features]``, of the module's dtype or autocast's."""
        x = input
        if self._packed is None:
            return on_meta(self, x)
        if type(x) is not torch.Tensor and isinstance(x, torch.Tensor) and hasattr(x, "device_mesh"):
            return on_mesh(self, x)
        return self.multiply(x, self._bare(x), self.bias, self.columns)

    def multiply(
        self,
        x: torch.Tensor,
        arrays: list[torch.Tensor] | None,
        bias: torch.Tensor | None,
        columns: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the product with bare tensors of a weight like the layer's; None: with the layer's own."""
        if self._reorders:
            x = x.index_select(-1, columns)  # type: ignore[arg-type]
        traced = not isinstance(x, torch.Tensor)
        if traced:
            require_kind(x, torch.fx.Proxy, "a Linear is called with a tensor")
        low = None if traced else autocast_type(x)
        x = x if low is None else x.to(self.dtype)
        own = cast("PackedWeight", self._packed)
        y = self._matmul(x, own, bias) if arrays is None else self._matmul.apply(x, arrays, bias)
        return y if low is None else y.to(low)

    def _bare(self, x: Any) -> list[torch.Tensor] | None:
        """Return the buffers where a graph takes them or ``torch.func.functional_call`` brings others."""
        graph = torch.compiler.is_compiling() or is_captured() or is_recorded()
        if graph or not isinstance(x, torch.Tensor):  # torch.fx traces
            return self.arrays
        held, packed = map(self._buffers.get, self._names), cast("PackedWeight", self._packed)
        return None if packed.holds(held) else self.arrays

    @property
    def arrays(self) -> list[torch.Tensor]:
        """The weight as registered operators read it: the module's buffers, without their sums."""
        return [getattr(self, name) for name in self._names[:-1]]

    def extra_repr(self) -> str:
        """Return what the module is."""
        gemm = self._matmul.gemm
        options = ", ".join(f"{name}={value!r}" for name, value in self._options.items() if value is not None)
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None},"
            f" {options}, activation={gemm.activation!r}, dtype={self.dtype}"
        )

    def _operator(self, dtype: torch.dtype, bias: bool | None = None) -> Matmul:
        """Return the product in a dtype; by default it takes a bias where the layer has one."""
        if dtype not in TYPES:
            raise DTypeError(f"Linear computes in {', '.join(map(str, TYPES))}, not in {dtype}")
        output = TYPES[dtype]
        activation = self._activation or output
        gemm = gemm_for(
            self.out_features,
            self.in_features,
            get_type(str(self._options["weight"])),
            activation,
            output=output,
            group_size=self._options["group_size"],  # type: ignore[arg-type]
            zero=self._options["zero"],  # type: ignore[arg-type]
            bias=self.bias is not None if bias is None else bias,
            token_scale=activation in EIGHT_BIT,
            batch_invariant=self.batch_invariant,
        )
        return Matmul.from_request(Request(gemm))

    def _set_packed(self, packed: PackedWeight | None) -> None:
        """Hold packed arrays as buffers, so that torch sees them, but not in ``state_dict``."""
        for name in self._names:
            delattr(self, name)
        held = {} if packed is None else packed.held
        self._names = tuple(f"packed_{name}" for name in held)
        self._packed = packed
        for name, array in zip(self._names, held.values(), strict=True):
            self.register_buffer(name, array, persistent=False)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the tensors that the weights give again."""
        buffers = {name: each for name, each in self._buffers.items() if name not in self._names}
        state = {**self.__dict__, "_buffers": buffers, "_names": (), "_stored": None}
        return state if self._is_known() else state | {"_canonical": None, "_recovery": None}

    def _is_known(self) -> bool:
        """Tell whether the canonical weight, if one was kept, is that of the packed one."""
        return self._packed is None or not self._packed.is_written or self.canonical is not None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Hold the weights' tensors again."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._set_packed(self._packed)
        self._keep(self._canonical)

    def _keep(self, weight: QuantizedTensor | None) -> None:
        """Hold a weight in canonical storage, or none."""
        self._canonical = None if weight is None else weight.to("cpu")
        self._stored = None if self._canonical is None else Stored.of(self._canonical)

    def _set_columns(self, order: torch.Tensor | None) -> None:
        """Hold the order in which the stored columns take inputs."""
        self.columns = None if order is None else order.to(self._where, torch.int64)
        self._reorders = order is not None

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Linear:
        """Follow ``.to``, ``.cuda``, ``.half``: packed arrays move but never change type.

        Raises DTypeError, DeviceError if the layer cannot; it stays as it is.
        """
        packed = self._packed
        probe = fn(torch.empty(0, dtype=self.dtype, device=self._where))
        matmul = self._matmul if probe.dtype == self.dtype else self._operator(probe.dtype)
        fits = packed is not None and packed.layout == matmul.layout(probe.device.type)
        whole = None if fits else self._recovered(packed)
        if packed is not None and not fits and whole is None and probe.device.type != "meta":
            raise DeviceError(NOT_KEPT.format(probe.device, probe.dtype))
        self._set_packed(None)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        moved = probe.device != self._where
        self._matmul, self.dtype, self._where = matmul, probe.dtype, probe.device
        if packed is not None and fits:
            self._set_packed(packed.to(self._where) if moved else packed)
        elif whole is not None:
            self.set_weight(whole)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Add the weight, canonical if it was kept, else packed."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        whole = self.canonical
        kept, form = (vars(self.packed), PACKED) if whole is None else (state_of(whole), WEIGHT)
        destination.update({prefix + form + name: array for name, array in kept.items()})

    @property
    def packed(self) -> SimpleNamespace:
        """What a state dict has of the packed weight: nothing if there is none."""
        return SimpleNamespace(**(state_of_packed(self._packed, self.columns) if self._packed else {}))

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Take the weight in either form."""
        ours = keys_of(state_dict, prefix)
        rest = {key: value for key, value in state_dict.items() if key not in ours}
        super()._load_from_state_dict(
            rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if (assign := local_metadata.get("assign_to_params_buffers")) and self._where.type == "meta" and ours:
            self._where = (self.bias if self.bias is not None else state_dict[min(ours)]).device
        taken = {key: state_dict[key] if assign else copied(state_dict[key]) for key in ours}
        load(self, taken, prefix, missing_keys, error_msgs)

    def set_packed(self, packed: PackedWeight, columns: torch.Tensor | None = None) -> None:
        """Take a packed weight; no canonical one is kept.

        Raises ArtifactError if it was packed for another layer.
        """
        expected = self._matmul.layout(self._where.type)
        if packed.layout != expected:
            raise ArtifactError(f"it was packed for [{packed.layout}], this module needs [{expected}]")
        self._keep(None)
        self._recovery = None
        self._set_packed(packed.to(self._where))
        self._set_columns(columns)
