"""What an operator did: which aten operators it ran, what these wrote, and how they may fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.overrides
from torch.utils._python_dispatch import TorchDispatchMode

from ladder.capture.values.aliasing import storage_of
from ladder.capture.values.fakes import shapes_of_fakes
from ladder.capture.values.indices import Use, uses
from ladder.capture.values.kinds import is_a
from ladder.runtime.failing import may_raise


class Refused(BaseException):
    """Raised in place of an operator that would draw random numbers, or write memory that it may not."""


class Monitor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches which aten operators a call runs.

    ``dynamic``: the shape of a result depends on values; ``ranks``: so may its number of axes.
    ``risks``: why it may raise depending on values, by indices or (None) otherwise.
    ``mutated``: the storages written; ``counted``: how often versions say so. ``moved``: how tensors lay that
    got another shape or other strides.
    ``random``: a generator advanced. ``fails``: whether it may raise in a later run, as far as is known.
    ``unwritten``: storages that it may not write, nor may it draw numbers then; None if it may do all.
    """

    def __init__(self, unwritten: Collection[int] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unwritten = unwritten
        self.dynamic = self.random = self.shape_depends = self.fails = self.ranks = False
        self.read: list[torch.Tensor] = []
        self.risks: list[list[Use] | None] = []
        self.mutated: set[int] = set()
        self.counted: Counter[int] = Counter()
        self.moved: list[tuple[torch.Tensor, Place]] = []
        self.operators = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave the mode undecorated: torch's decorator would import the whole of ``torch._dynamo``."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note `func`, then run it; in inference mode, one that is made of others runs as those."""
        kwargs = kwargs or {}
        if not torch.is_inference_mode_enabled() or _has(func, _VIEWS):
            return self._note_and_run(func, args, kwargs)
        with _noting_views():
            if not _has(func, _COMPOSITE):
                return self._note_and_run(func, args, kwargs)
            with self:  # outside of inference mode, autograd has taken it apart
                return func._op_dk(_COMPOSITE, *args, **kwargs)

    def _note_and_run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tags, name = func.tags, func._schema.name.removeprefix("aten::")
        self.operators += 1
        depends = torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags
        depends = depends and not _takes_numbers(name, args)
        if not func._schema.name.startswith(TAGGED):
            shapes = shapes_of_fakes(func, args, kwargs)
            self.ranks |= shapes is None
            depends |= shapes is None or not all(is_a(extent, int) for shape in shapes for extent in shape)
        self.ranks |= name.startswith("squeeze")
        self.dynamic |= depends
        if name == "_local_scalar_dense":
            self.read.append(args[0])
        else:
            self.shape_depends |= depends
        self.random |= torch.Tag.nondeterministic_seeded in tags and not _drops_nothing(func, args, kwargs)
        if may_raise(func, args):
            self.risks.append(uses(name, args))
        written_to: list[torch.Tensor] = []
        counted = self.counted.copy()
        for place, argument in enumerate(func._schema.arguments):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written or (argument.name.startswith("running") and _updates_statistics(func, args, kwargs)):
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                written_to += self._note_written(value, int(written))
        if self.unwritten is not None and (self.random or not self.mutated.isdisjoint(self.unwritten)):
            raise Refused
        before = [*map(place_of, written_to)]
        try:
            result = func(*args, **kwargs)
        except Exception:
            self.counted = counted  # versions grow once an operator has run
            raise
        pairs = zip(written_to, before, strict=True)
        self.moved += [(item, place) for item, place in pairs if place_of(item) != place]
        return result

    def _note_written(self, value: Any, times: int) -> list[torch.Tensor]:
        items = value if is_a(value, list | tuple) else [value]
        tensors = [item for item in items if is_a(item, torch.Tensor) and item.layout is torch.strided]
        for item in tensors:
            self.mutated.add(storage_of(item))
            self.counted[storage_of(item)] += times
        return [item for item in tensors if not item.is_nested]  # those have no place


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_VIEWS = torch._C.DispatchKey.ADInplaceOrView
"""Where operators note which tensors are views, and count what they write."""


def _has(func: Any, key: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))


@contextmanager
def _noting_views() -> Iterator[None]:
    """Let what an operator calls note views, which torch leaves out inside of a mode's own function."""
    left_out = torch._C._dispatch_tls_is_dispatch_key_excluded(_VIEWS)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_VIEWS, False)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_VIEWS, left_out)


TAGGED = ("aten::", "prims::", "ladder::")
"""Namespaces whose operators have a tag where shapes of results depend on values."""


Place = tuple[torch.Size, tuple[int, ...], int | torch.SymInt]
"""Shape, strides and offset of a tensor."""


def place_of(tensor: torch.Tensor) -> Place:
    """Return where the elements of a tensor lie in its memory."""
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _drops_nothing(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Say whether an operator, as of attention, is given a probability of dropping elements that is 0."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(given == 0)
    return False


def _updates_statistics(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Say whether a batch norm writes its running statistics, which schemas do not tell: where it trains."""
    if "batch_norm" not in func._schema.name:
        return False
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in ("training", "train"):
            given = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
            return given is not False
    return not func._schema.name.endswith("_no_training")


def _takes_numbers(name: str, args: Sequence[Any]) -> bool:
    """Say whether an operator is ``x[indices]`` by integers, whose shape follows from those of operands."""
    masks = (torch.bool, torch.uint8)
    return name == "index" and not any(index is not None and index.dtype in masks for index in args[1])
