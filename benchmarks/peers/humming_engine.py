"""humming-kernels: CUDA C++ kernels compiled for each shape and range of M at the first call."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

import torch

from benchmarks.peers.engine import Engine, Operand, Work

WEIGHTS: Mapping[str, str] = {
    **{f"int{bits}": f"int{bits}" for bits in range(1, 9)},
    "uint4": "uint4",
    "mxfp4": "float4e2m1",
    "fp8_e4m3": "float8e4m3",
}
"""humming's names of weight types."""

ACTIVATIONS: Mapping[str, str] = {"int8": "int8", "fp8_e4m3": "float8e4m3"}
"""humming's names of activation types that it quantizes to."""


COMPILERS = "2"
"""Compilers that one process starts at a time: many processes warm at once."""


class HummingOperand(Operand):
    """A layer of humming.

    Parameters
    ----------
    layer
        Transformed `HummingLayer`.
    weights
        What its codes stand for, float32 ``[n, k]``.
    nbytes
        Bytes of codes and scales.
    quantizes
        Whether the call quantizes activations; otherwise `given` did, for 8-bit activations.
    tuning
        humming's own choice of kernels, those of the M that are measured.
    """

    def __init__(self, layer: Any, weights: Any, nbytes: int, quantizes: bool, tuning: str) -> None:
        self.layer, self.nbytes, self.quantizes, self.tuning = layer, nbytes, quantizes, tuning
        self.weights = weights

    def dense(self) -> Any:
        return self.weights.double()

    def clone(self) -> Operand:
        return HummingOperand(twin(self.layer), self.weights, self.nbytes, self.quantizes, self.tuning)

    def _process(self, x: Any) -> tuple[Any, Any]:
        codes, _, scale = import_module("humming.forward").may_process_input(
            self.layer.humming_config, inputs=x
        )
        return codes, scale

    def given(self, x: Any) -> tuple[Any, ...]:
        return (x,) if self.quantizes else self._process(x)

    def seen(self, *given: Any) -> Any:
        codes, scale = self._process(given[0]) if self.quantizes else given
        return codes.double() if scale is None else codes.double() * scale.double()

    def __call__(self, *given: Any) -> Any:
        scale = given[1] if len(given) > 1 else None
        return self.layer(given[0], input_scale=scale, tuning_config=self.tuning)


def twin(layer: Any) -> Any:
    """Return a layer with tensors of its own that shares everything else."""
    made = copy.copy(layer)
    made._parameters = {
        name: torch.nn.Parameter(p.detach().clone(), requires_grad=False)
        for name, p in layer._parameters.items()
        if p is not None
    }
    made._buffers = {name: buffer.clone() for name, buffer in layer._buffers.items()}
    return made


class Humming(Engine):
    """humming-kernels, each kernel with the library's own heuristics."""

    distribution: ClassVar[str] = "humming-kernels"
    module: ClassVar[str] = "humming"
    warms: ClassVar[bool] = True

    def refusal(self, work: Work, n: int, k: int, m: int) -> str:
        if work.zero == "float":
            return "humming's zero points are integers here"
        return "" if work.weight in WEIGHTS else f"humming has no type {work.weight}"

    def prepare(self, work: Work, weight: Any, tokens: tuple[int, ...]) -> Operand:
        os.environ.setdefault("HUMMING_MAX_PARALLEL_BUILD_WORKERS", COMPILERS)
        n, k = weight.shape
        dtype = getattr(torch, work.source)

        def layer() -> Any:
            options = {"shape_n": n, "shape_k": k, "torch_dtype": dtype}
            made = import_module("humming.layer").HummingLayer(
                weight_config=weight_options(work), input_config=input_options(work), **options
            )
            return made.to("cuda")

        source = layer()
        source.load_from_unquantized(weight.to(dtype))
        held = {name: t.detach().clone() for name, t in source.state_dict().items() if name != "locks"}
        weights = source.weight_schema.dequant_tensors(dict(held)).float()
        nbytes = sum(tensor.nbytes for tensor in held.values())
        ready = layer()
        ready.load_from_tensors(held)
        ready.transform()
        eight_bit = work.activation in ACTIVATIONS
        tuning = own_choice(ready, tokens)
        return HummingOperand(ready, weights, nbytes, work.dynamic or not eight_bit, tuning)


def weight_options(work: Work) -> dict[str, Any]:
    """Return humming's description of the weight; group size 0 is one scale per row."""
    block = work.weight.startswith("mx")
    return {
        "dtype": WEIGHTS[work.weight],
        "scale_dtype": "float8e8m0" if block else work.source,
        "group_size": 32 if block else work.group_size,
    } | ({"has_zero_point": True} if work.zero else {})


def input_options(work: Work) -> dict[str, Any] | None:
    """Return humming's description of 8-bit activations."""
    return {"dtype": ACTIVATIONS[work.activation]} if work.activation in ACTIVATIONS else None


def own_choice(layer: Any, tokens: tuple[int, ...]) -> str:
    """Return humming's default kernels as JSON, without the ranges of M that nothing is measured in.

    Ranges are from above their first number up to their second. The launcher looks up M = 1
    whatever M is, so the first range that is kept begins at 0.
    """
    ranges = import_module("humming.tune").get_heuristics_config(layer.humming_config)
    used = [one for one in ranges if any(one[0] < m <= one[1] for m in tokens)]
    return json.dumps([[0, *used[0][1:]], *used[1:]])
