"""`compile`: whole models, captured, imported, partitioned, lowered and run as one plan."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from ladder.api.compiler import Compiler
from ladder.api.freeze import Frozen, freeze_for_file
from ladder.capture import Captured, capture
from ladder.capture.containers import plain
from ladder.capture.records import Backend
from ladder.runtime.model.build import Built
from tile_types.errors import ShapeError, ValueRangeError, path_of, require_kind

if TYPE_CHECKING:
    from ladder.api.onnx_model import OnnxModel
    from ladder.api.open_export import OpenAxes


Shapes = Mapping[str, Sequence[int]]


class Compiled(Captured):
    """A function or model that is captured when it runs, and whose graphs run as plans of ours.

    Parameters
    ----------
    function
        A Python function, method, `torch.nn.Module` or other callable.
    precise, search
        See `compile`.
    """

    def __init__(self, function: Callable[..., Any], precise: bool = False, search: float = 0.0) -> None:
        self.compiler = Compiler(precise, search)
        super().__init__(function, self.compiler)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what copies and pickles are made of."""
        return plain(type(self)), (self.function, self.compiler.precise, self.compiler.search)

    @property
    def models(self) -> list[Built]:
        """The compiled graphs, in the order in which they were made."""
        return self.compiler.built

    @property
    def refused(self) -> list[str]:
        """Why graphs run operator by operator, one entry per graph that does."""
        return self.compiler.refused

    def where_it_ran(self) -> list[str]:
        """Return a line for each graph: how many steps run on kernels of Ladder's, and which torch runs."""
        lines = [f"plan {at}: {steps_by_executor(built)}" for at, built in enumerate(self.models)]
        return [*lines, *(f"not compiled: {reason}" for reason in self.refused)]

    def plan(self) -> str:
        """Return the plan of every graph as text: one line per step, with what executes it."""
        plans = [f"graph {at}\n{built.plan}" for at, built in enumerate(self.models)]
        rest = (f"not compiled: {reason}" for reason in self.refused)
        return "\n\n".join([*plans, *self.compiler.alone, *rest])

    def export(
        self,
        path: str | os.PathLike[str],
        *arguments: Any,
        open_axes: Mapping[str, Sequence[int]] | None = None,
        sign: Any = None,
        **named: Any,
    ) -> Path:
        """Write the model to one file that `ladder.load` runs without its source and without a compiler.

        Parameters
        ----------
        path
            The file; replaced in one step if it exists.
        *arguments, **named
            Example inputs: the file is for their shapes, types and device.
        open_axes
            Parameter -> axes of its tensor that may have any extent from 2 on, e.g. ``{"x": [0]}``.
        sign
            An Ed25519 key that signs the file: an object of ``cryptography``, PEM text or the path of it.

        Returns
        -------
        The path. State that the model changes in place is in the file, as it was before.

        Raises
        ------
        LadderError
            If the model is not one graph, or takes or returns what no file can hold; the message says what.
        """
        from ladder.runtime.model.saved import save_model

        where = path_of(path, "the file")
        return save_model(self._frozen(arguments, named, open_axes).whole(), where, sign)

    def to_onnx(
        self, path: str | os.PathLike[str], *arguments: Any, external: bool | None = None, **named: Any
    ) -> Path:
        """Write the tile graph, with its tTypes as attributes, as an ONNX model that `compile` reads.

        Parameters
        ----------
        path
            The file.
        *arguments, **named
            Example inputs.
        external
            Whether tensors go into ``<path>.data``; by default where they take more than 2 GB.

        Raises
        ------
        LadderError
            As `export`; also if the model changes state in place, which ONNX models do not have.
        """
        from ladder.frontend.onnx_export import export_onnx

        where = path_of(path, "the file")
        return export_onnx(self._frozen(arguments, named).imported(), where, external=external)

    def _frozen(
        self, arguments: tuple[Any, ...], named: Mapping[str, Any], axes: OpenAxes | None = None
    ) -> Frozen:
        """Return the model with what one call of it showed."""
        if axes is not None and not isinstance(axes, Mapping):
            raise ShapeError(f'open_axes says which axes of which parameter, as {{"x": [0]}}, got {axes!r}')
        return freeze_for_file(self.function, arguments, named, axes or {}, self.compiler.precise)


def steps_by_executor(built: Built) -> str:
    """Return how many steps of a plan run on kernels of Ladder's, and how often torch runs which function."""
    steps = [(kind, executor) for kind, executor, _, _ in built.plan.table() if kind != "view"]
    called = Counter(executor for _, executor in steps if executor.startswith("torch"))
    by_torch = ", ".join(f"{count} {name}" for name, count in called.most_common())
    which = f" ({by_torch})" if called else ""
    return f"{len(steps) - called.total()} steps on Ladder's kernels, {called.total()} in torch{which}"


@overload
def compile(
    function: str | os.PathLike[str], *, precise: bool = False, shapes: Shapes | None = None
) -> OnnxModel: ...


@overload
def compile(function: Callable[..., Any], *, precise: bool = False, search: float = 0.0) -> Compiled: ...


@overload
def compile(function: Callable[..., Any], *, backend: Backend | None) -> Captured: ...


def compile(
    function: Any,
    *,
    backend: Backend | None = None,
    precise: bool = False,
    shapes: Shapes | None = None,
    search: float = 0.0,
) -> Captured | OnnxModel:
    """Capture a function or model as it runs, and run its operator graphs as compiled plans.

    Quantized products run on Ladder's kernels, with bias and function of one number inside; chains of
    memory-bound operators become one kernel each; what is left is called in torch, and the plan names it.

    Parameters
    ----------
    function
        A Python function, method, `torch.nn.Module` or other callable; or an ONNX model, as a path or as an
        ``onnx.ModelProto``, which is imported as it is: see `OnnxModel`.
    backend
        What runs graphs instead: ``backend(graph_module, example_inputs)`` returns a callable.
    precise
        Whether each operator's result is rounded as in torch: 16-bit results between operators too, which
        kernels otherwise keep in float32; and no operators become one. See `ladder/ir/README.md`.
    shapes
        Of an ONNX model: input -> the shape that it has in every call, e.g. ``{"image": (1, 3, 224, 224)}``.
        By default sizes that the file leaves open stay open; where they are known, more becomes one plan,
        and kernels are for these sizes.
    search
        Seconds per graph in which the superoptimizer searches kernels for parts that its shipped database of
        proven graphs lacks; what it finds is kept in the cache folder. On NVIDIA GPUs.

    Returns
    -------
    A callable with `Captured.explain` and, without ``backend``, `Compiled.plan`; for a module, its stand-in.

    Raises
    ------
    ArtifactError, ImportRefused
        If an ONNX file cannot be read, or uses what is not supported; the message names it.

    Examples
    --------
    >>> fast = ladder.compile(ladder.quantize_(model, "int4", group_size=128))
    >>> with torch.no_grad():
    ...     y = fast(x)
    >>> print(fast.plan())
    """
    _require_options(precise, search)
    if isinstance(function, str | os.PathLike) or type(function).__name__ == "ModelProto":
        from ladder.api.onnx_model import OnnxModel

        if backend is not None:
            raise TypeError("an ONNX model is not captured: leave out backend")
        return OnnxModel(function, precise, shapes)
    if shapes is not None:
        raise TypeError("what is captured has the shapes of its calls: leave out shapes")
    if not callable(function):
        kind = type(function).__name__
        raise TypeError(f"ladder.compile takes a function, a module or an ONNX model, not {kind}")
    return Compiled(function, precise, search) if backend is None else capture(function, backend=backend)


def _require_options(precise: object, search: float) -> None:
    """Raise DTypeError or ValueRangeError for options that are none."""
    require_kind(precise, bool, "precise is True or False")
    require_kind(search, (int, float), "search is a number of seconds")
    if not search >= 0 or isinstance(search, bool):
        raise ValueRangeError(f"search is a number of seconds, at least 0, got {search}")
