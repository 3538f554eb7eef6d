"""Weights in the form that kernels stream, as named tensors."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from dataclasses import fields as dataclass_fields
from functools import cached_property
from operator import is_
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ladder.ir.gemm import Gemm
from ladder.runtime.fields import require
from ladder.runtime.threads import torch_together
from ladder.runtime.words import Words, version_of
from schedules.cpu_layout import cpu_layout
from tile_types.arrays import arrays_of, from_portable, portable
from tile_types.errors import ArtifactError, ConversionError, ShapeError, TypeValuesError, require_kind
from tile_types.forms import is_arithmetic
from tile_types.held import held
from tile_types.identity import VALUES, own_values, require_values
from tile_types.multiples import as_multiple, own_name
from tile_types.representable import unheld_codes
from tile_types.ttype import EXHAUSTIBLE_BITS

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from targets import TileDevice
    from tile_types.quantized import QuantizedTensor

METADATA = "ladder.packed_weight"
"""Key of the JSON description in a safetensors header."""

LAYOUT_FIELDS = ("n", "k", "weight", "activation", "group_size", "scale", "zero")
"""Fields of a `Gemm` that decide what its packed weight looks like."""


GPU = "cuda"
"""Family of every GPU: torch's device type of AMD's, too."""

PACKING = 2
"""Form of packed weights for GPUs. Raise it when a type that ships is packed in another order of bits."""

CPU_PACKING, FACTORED, SUMMED_RUNS = 3, 4, 5
"""Form of packed weights for CPUs, alike, that of factored scales, and that of rows with one scale whose
columns are summed in runs; in older ones, scales and zero points were numbers of 4 bytes."""


def layout_of(gemm: Gemm, family: str, order: str = "") -> str:
    """Return the text that two operators must share to use one packed weight.

    gemm: The problem.
    family: ``"cuda"`` or ``"cpu"``: each has one layout for all M, and for all devices without an order of
        bits of their own.
    order: `own_order` of the device.
    """
    further = [name for name in ("experts", "power_scales") if getattr(gemm, name)]
    told = [f"{name}={getattr(gemm, name)}" for name in (*LAYOUT_FIELDS, *further)]
    return " ".join([family, *told, *([f"order={order}"] if order else [])])


def own_order(gemm: Gemm, device: TileDevice) -> str:
    """Return the order in which a device alone packs the bits of a weight; empty where GPUs share one."""
    from schedules.codes import held_type, order_read

    return order_read(held_type(gemm.weight), gemm.activation, device)


def form_of(gemm: Gemm, family: str) -> int:
    """Return the form of a packed weight; for GPUs another one where its codes change."""
    if family != GPU:
        return SUMMED_RUNS if gemm.group_size >= gemm.k and cpu_layout(gemm).group else CPU_PACKING
    from schedules.codes import is_renumbered

    return PACKING + is_renumbered(gemm.weight)


def check_packed(packed: object) -> None:
    """Raise DTypeError unless the operand is what an operator's ``pack`` returned."""
    require_kind(packed, PackedWeight, "packed must be what this operator's pack(weight) returned")


def refuse_layout(found: str, expected: str) -> NoReturn:
    """Raise the error for a weight that was packed for another operator."""
    raise ShapeError(f"the weight was packed for [{found}], this operator needs [{expected}]")


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """One weight matrix in a kernel's layout.

    Parameters
    ----------
    gemm
        The problem it was packed for.
    family
        ``"cuda"`` or ``"cpu"``.
    arrays
        Tensors by name, in the order in which the kernel takes them. On CPUs they become views with a storage
        of their own: pickling for another process moves it to shared memory, and kernels keep theirs.
    order
        `own_order` of the device.
    """

    gemm: Gemm
    family: str
    arrays: Mapping[str, torch.Tensor]
    order: str = ""

    layout: str = field(init=False, repr=False)
    """Layout that operators compare before they use this weight; see `layout_of`."""
    tensors: list[torch.Tensor] = field(init=False, repr=False)
    """The arrays as the kernel takes them."""
    buffers: list[torch.Tensor] = field(init=False, repr=False)
    """The arrays as modules hold them and graphs pass them on: `signed` views."""
    _versions: list[int] = field(init=False, repr=False)
    words: Words = field(init=False, repr=False)
    """Those of them that are of integers."""
    owners: list[torch.Tensor] = field(init=False, repr=False)
    """The tensors whose memory the arrays are."""

    def __post_init__(self) -> None:
        require_kind(self.gemm, Gemm, "gemm of a packed weight is the problem it was packed for")
        require_kind(self.arrays, Mapping, "arrays of a packed weight are tensors by name")
        object.__setattr__(self, "layout", layout_of(self.gemm, self.family, self.order))
        object.__setattr__(self, "owners", list(self.arrays.values()))
        object.__setattr__(self, "arrays", {name: _viewed(each) for name, each in self.arrays.items()})
        object.__setattr__(self, "tensors", list(self.arrays.values()))
        object.__setattr__(self, "buffers", [*map(signed, self.tensors)])
        object.__setattr__(self, "_versions", self._written())
        object.__setattr__(self, "words", Words(self.buffers))

    def equals(self, other: PackedWeight) -> bool:
        """Tell whether the arrays hold those of another weight; then they count as unwritten from here on."""
        import torch

        same = all(map(torch.equal, self.buffers, other.buffers))
        object.__setattr__(self, "_versions", self._written() if same else self._versions)
        return same

    @property
    def held(self) -> dict[str, torch.Tensor]:
        """What modules hold, by name: the buffers, and the sums of their words last."""
        return {**dict(zip(self.arrays, self.buffers, strict=True)), "sums": self.words.sums}

    def holds(self, buffers: Iterable[Any]) -> bool:
        """Tell whether tensors are its buffers.

        Raises ArtifactError if they are, but were written with what is no weight (`Words.check`).
        """
        same = all(map(is_, buffers, self.buffers))
        if same:
            self.words.check()
        return same

    @property
    def is_written(self) -> bool:
        """Whether an array was written since, as when torch's data parallelism sends those of a process.

        Raises ArtifactError if it was with what is no weight (`Words.check`).
        """
        self.words.check()
        return self._written() != self._versions

    def _written(self) -> list[int]:
        """Return how often each array was written, as far as torch counts it."""
        return [*map(version_of, self.buffers)]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def is_factored(self) -> bool:
        """Whether scales, and offsets in place of zero points, are factors (`cpu.pack.factors_of`)."""
        from ladder.lower.cpu.pack import HALF

        scales = self.arrays.get("scales")
        count = cpu_layout(self.gemm).factored if self.family != GPU else 0
        return bool(count) and scales is not None and scales.shape[-1] == HALF + count

    @property
    def device(self) -> torch.device:
        """Where the arrays live."""
        return self.tensors[0].device

    @cached_property
    def foreign(self) -> tuple[Any, ...]:
        """The arrays as ``tvm_ffi`` tensors: converted once, they cost a call nothing."""
        import tvm_ffi

        return tuple(map(tvm_ffi.from_dlpack, self.owners))

    @cached_property
    def calls(self) -> dict[Any, Any]:
        """Calls of operators that are bound to this weight (`CompiledGemm.bind`)."""
        return {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle by description and bytes (`portable`), without what is derived on first use."""
        self.words.check()
        return _restored, (self.describe(), {name: portable(each) for name, each in self.arrays.items()})

    def to(self, device: torch.device | str) -> PackedWeight:
        """Return a copy on another device of the same family."""
        self.words.check()
        arrays = {name: array.to(device) for name, array in self.arrays.items()}
        return replace(self, arrays=arrays)

    def describe(self) -> str:
        """Return the JSON text that, with the arrays, restores this value."""
        fields = {"gemm": asdict(self.gemm), "family": self.family, "order": list(self.arrays)}
        own = own_values(self.gemm.weight)
        values = {VALUES: own} if own else {}
        form = FACTORED if self.is_factored else form_of(self.gemm, self.family)
        return json.dumps({**fields, "packing": form, "bits": self.order, **values})

    def to_bytes(self) -> bytes:
        from safetensors.torch import save

        arrays = {name: array.detach().cpu().contiguous() for name, array in self.arrays.items()}
        return bytes(save(arrays, metadata={METADATA: self.describe()}))

    @classmethod
    def from_bytes(cls, data: bytes, device: torch.device | str = "cpu") -> PackedWeight:
        """Read what `to_bytes` wrote.

        Raises ArtifactError if the data is truncated or holds something else.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            length = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + length])["__metadata__"][METADATA]
            found = cls.from_arrays(header, load(data))
        except TypeValuesError:
            raise
        except (SafetensorError, ValueError, KeyError, TypeError, RecursionError, ArtifactError) as error:
            raise ArtifactError(f"these bytes hold no packed weight: {error!r}; export it again") from error
        return found.to(device)

    @classmethod
    def from_arrays(cls, description: str, arrays: Mapping[str, torch.Tensor]) -> PackedWeight:
        """Restore from `describe` and the named arrays.

        Raises ArtifactError if an older Ladder packed them in a form that kernels read no more, or its type
            has other values here.
        """
        fields = json.loads(description)
        require_values(fields.get(VALUES))
        gemm, form = gemm_from_dict(fields["gemm"]), fields.get("packing")
        read = form_of(gemm, fields["family"])
        if form != read and not (form == FACTORED and fields["family"] != GPU):
            whose = "GPUs" if fields["family"] == GPU else "CPUs"
            raise ArtifactError(
                f"the weight was packed for {whose} in form {form}, but form {read}"
                " is what kernels read now; quantize and pack it again"
            )
        ordered = {name: as_taken(arrays[name]) for name in fields["order"]}
        return cls(gemm, fields["family"], ordered, str(fields.get("bits", "")))


def signed(array: torch.Tensor) -> torch.Tensor:
    """Return an array of a packed weight as modules hold it: gloo and NCCL send no uint32 words."""
    import torch

    return array.view(torch.int32) if array.dtype == torch.uint32 else array


def as_taken(array: torch.Tensor) -> torch.Tensor:
    """Return an array of a packed weight as kernels take it: what is int32 was uint32 before `signed`."""
    import torch

    if array.dtype is not torch.int32:
        return array
    known = _WORDS.get(id(array))
    if known is None or known[0]() is not array or known[1] != array.data_ptr():
        key = id(array)
        kept = weakref.ref(array, lambda _: _WORDS.pop(key, None))
        known = _WORDS[key] = kept, array.data_ptr(), array.data.view(torch.uint32)
    return known[2]


_WORDS: dict[int, tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = {}
"""Id of an int32 array -> the array, its address, and its words: to view them takes microseconds."""


def _viewed(array: torch.Tensor) -> torch.Tensor:
    """Return a view of a CPU's memory that has a storage of its own; other tensors as they are."""
    import torch
    from torch.utils.dlpack import from_dlpack

    return from_dlpack(array) if type(array) is torch.Tensor and array.is_cpu else array


def _restored(description: str, kept: Mapping[str, Any]) -> PackedWeight:
    return PackedWeight.from_arrays(description, {name: from_portable(each) for name, each in kept.items()})


def gemm_from_dict(fields: Mapping[str, Any]) -> Gemm:
    """Restore a `Gemm` from ``dataclasses.asdict`` that went through JSON.

    Raises ArtifactError if a number, a text or a truth value is none.
    """
    require(dict(fields), {name: GEMM_FORM[name] for name in fields if name in GEMM_FORM}, "gemm")
    return Gemm(**{**fields, "epilogue": tuple(fields.get("epilogue", ()))})


_PLAIN = {"int": int, "str": str, "bool": bool}
GEMM_FORM = {item.name: _PLAIN[str(item.type)] for item in dataclass_fields(Gemm) if str(item.type) in _PLAIN}
"""Field of a problem -> what it is in JSON."""


def pack(gemm: Gemm, device: TileDevice, weight: QuantizedTensor) -> PackedWeight:
    """Bring a quantized matrix into the layout of a device, where the matrix's arrays live.

    gemm: The problem; its N, K, types and group size must be the matrix's.
    device: Any device of the family that packs bits in the same order (`own_order`).
    weight: Codes ``[N, K]`` with scales and zero points; an offset becomes zero points. Of a problem whose
        type is a multiple (`tile_types.multiples`), the matrix has the type that it is a multiple of.
    Raises ShapeError if the matrix is not the one the problem speaks of.
    Raises ConversionError if it has codes whose values, such as NaN, the device's operand type lacks.
    """
    from ladder.lower import cpu

    large = weight.shape[0] * weight.shape[1] >= LARGE
    with torch_together() if large else nullcontext():
        if device.is_gpu or not cpu.factors_of(gemm, weight):
            weight = as_multiple(weight.without_offset(), gemm.weight)
        _check_weight(gemm, weight)
        _check_codes(weight, _operand_type(gemm, device), device)
        if device.is_gpu:
            return PackedWeight(gemm, GPU, _fragments(gemm, device, weight), own_order(gemm, device))
        from ladder.runtime.cpu_words import pack_words, transposed

        return PackedWeight(gemm, "cpu", cpu.pack(gemm, weight, pack_words, transposed))


LARGE = 1 << 22
"""Codes of a weight from which torch's operators on its scales and zero points gain by all threads."""


def _check_weight(gemm: Gemm, weight: QuantizedTensor) -> None:
    """Compare the matrix with the problem."""
    zero = weight.zero_kind if weight.offset is None else "float"
    found = {"N": weight.shape[0], "K": weight.shape[1], "type": own_name(weight.ttype.name), "zero": zero}
    wanted = {"N": gemm.n, "K": gemm.k, "type": own_name(gemm.weight), "zero": gemm.zero}
    wrong = [
        f"{name} is {found[name]}, expected {wanted[name]}" for name in wanted if found[name] != wanted[name]
    ]
    group = min(weight.block[1], gemm.k)
    if weight.columns is not None:
        wrong.append("its columns are in an order of their own, which ladder.Linear takes")
    if group != gemm.group_size:
        wrong.append(f"group size is {group}, expected {gemm.group_size}")
    if gemm.scale and weight.scale is None:
        wrong.append("the operator takes scales of groups, the weight has none")
    if wrong:
        raise ShapeError(f"this quantized weight does not fit the operator: {'; '.join(wrong)}")


def _operand_type(gemm: Gemm, device: TileDevice) -> str:
    """Return what the kernels of a device decode the weight to."""
    if device.is_gpu:
        from ladder.lower.gpu.proven import operand_type
    else:
        from ladder.ir.program.product import operand_type
    return operand_type(gemm)


def _check_codes(weight: QuantizedTensor, operand: str, device: TileDevice) -> None:
    """Raise ConversionError if a code stands for a value that the operand type lacks or no kernel decodes."""
    ttype = weight.ttype
    if ttype.elem_bits > EXHAUSTIBLE_BITS:
        return
    lost = unheld_codes(ttype, operand)
    _refuse_codes(weight, lost, f"do not exist in {operand}; use another activation type")
    rest, special = ~lost, ~np.isfinite(ttype.values())
    if device.is_gpu and ttype.name != operand and is_arithmetic(ttype):
        _refuse_codes(weight, special & rest, "are decoded as numbers by GPUs' kernels; only CPUs keep them")
    if (device.is_gpu or operand == "int8") and ttype.name != operand:
        left_out = ~np.isin(ttype.probe_codes(), ttype.valid_codes())
        _refuse_codes(weight, left_out & ~special & rest, "are left out of its finite_codes")


def _refuse_codes(weight: QuantizedTensor, lost: npt.NDArray[np.bool_], reason: str) -> None:
    """Raise ConversionError if one of some codes of the type occurs in a weight."""
    if not lost.any():
        return
    codes = weight.codes()
    xp = arrays_of(codes)
    if lost.sum() <= FEW_CODES:
        found = any(bool((codes == int(code)).any()) for code in np.flatnonzero(lost))
    else:
        found = bool(xp.take(xp.array(lost, "float64", codes), xp.cast(codes, "int32")).any())
    if found:
        names = ", ".join(f"{value:g}" for value in np.unique(weight.ttype.values()[lost])[:4])
        raise ConversionError(f"the weight has codes of {weight.ttype.name} whose values ({names}) {reason}")


FEW_CODES = 16
"""Codes that are looked for one by one: bytes are compared faster than looked up."""


def _fragments(gemm: Gemm, device: TileDevice, weight: QuantizedTensor) -> dict[str, torch.Tensor]:
    """Return the GPU arrays (`schedules.fragments`, `schedules.packed_scales`)."""
    from ladder.lower.gpu.proven import packed_layout
    from schedules import packed_scales
    from schedules.group_values import streams_exponents

    weight = packed_scales.within_reach(weight, gemm.activation)
    kept = held(weight.ttype.element_type)
    layout = packed_layout(kept.ttype, gemm.activation, device)
    scales = packed_scales.normalise_scales(
        weight, gemm.activation, grouped=gemm.scale, exponents=streams_exponents(gemm)
    )
    words = layout.pack(kept.renumbered(weight.codes()), pad_code=zero_code(kept.ttype))
    arrays = {
        "words": words.reshape(layout.packed_shape(gemm.n, gemm.k)),
        "scales": scales.scales,
        "zeros": scales.zeros,
        "row_scale": scales.row_scale,
    }
    where = words.device
    return {name: array.to(where) for name, array in arrays.items() if array is not None}


def zero_code(element: Any) -> int:
    """Return the code whose value is nearest 0: what padding holds."""
    codes, values = element.valid_codes(), element.probe_values()
    return int(codes[abs(values).argmin()])
