"""Programs that files hold as ``Model``, ``get_init_inputs()`` and ``get_inputs()``, at smaller sizes too."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.zoo import small_configuration

MAKERS = ("get_inputs", "get_init_inputs")
"""Functions whose integers are sizes too, as those that the module assigns are."""

SMALLEST, LARGER = 8, tuple(1 << power for power in range(4, 19))
"""Bounds of sizes: the first, and those that are tried after it, as long as a call is cheap."""

PRETRAINED = {
    "EleutherAI/gpt-neo-2.7B": "gpt_neo",
    "facebook/bart-large": "bart",
    "facebook/opt-1.3b": "opt",
    "google/bigbird-roberta-base": "big_bird",
    "google/electra-small-discriminator": "electra",
    "google/reformer-enwik8": "reformer",
    "gpt2": "gpt2",
}
"""Published model -> its type in transformers, of which a small one with random weights stands for it."""


@dataclass(frozen=True)
class Program:
    """A program: its text, and what its sizes become.

    Parameters
    ----------
    path
        Of the file.
    sizes
        An integer of the text -> what stands for it.
    """

    path: Path
    sizes: Mapping[int, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The folder and the file's name."""
        return f"{self.path.parent.name}/{self.path.stem}"

    def load(self) -> dict[str, Any]:
        """Execute the text, and return its names."""
        tree = ast.parse(self.path.read_text(encoding="utf-8"))
        for number in _sizes(tree):
            number.value = self.sizes.get(number.value, number.value)
        module: dict[str, Any] = {"__name__": self.path.stem}
        with _random_weights(self):
            exec(compile(tree, str(self.path), "exec"), module)
        return module

    def model(self, device: str) -> torch.nn.Module:
        """Return the model, whose weights are drawn by the same seed every time."""
        torch.manual_seed(0)
        module = self.load()
        with torch.device(device), _random_weights(self):
            made: torch.nn.Module = module["Model"](*module["get_init_inputs"]())
        return made.to(device)

    def inputs(self, device: str, seed: int = 0) -> list[Any]:
        """Return arguments that are drawn by a seed."""
        torch.manual_seed(1 + seed)
        module = self.load()
        with torch.device(device):
            given = list(module["get_inputs"]())
        return [torch.utils._pytree.tree_map(_on(device), each) for each in given]


def _on(device: str) -> Any:
    return lambda value: value.to(device) if isinstance(value, torch.Tensor) else value


def _sizes(tree: ast.Module) -> Iterator[Any]:
    """Yield the integers of the statements that give sizes, as constants of the syntax tree."""
    for statement in tree.body:
        named = isinstance(statement, ast.FunctionDef) and statement.name in MAKERS
        for node in ast.walk(statement) if named or isinstance(statement, ast.Assign) else ():
            if isinstance(node, ast.Constant) and type(node.value) is int:
                yield node


@contextlib.contextmanager
def _random_weights(program: Program) -> Iterator[None]:
    """Let transformers make small models with random weights where the program asks for published ones."""
    if "transformers" not in program.path.read_text(encoding="utf-8"):
        yield
        return
    import transformers

    models: Any = transformers

    def configured(name: str, **_: Any) -> Any:
        kind = PRETRAINED[name]
        return models.CONFIG_MAPPING[kind](**small_configuration(models.CONFIG_MAPPING[kind](), kind))

    def weighted(name: str, *, config: Any, **_: Any) -> Any:
        return models.AutoModelForCausalLM.from_config(config)

    with (
        patch.object(models.AutoConfig, "from_pretrained", configured),
        patch.object(models.AutoModelForCausalLM, "from_pretrained", weighted),
    ):
        yield


# ---- sizes ----------------------------------------------------------------------------
@dataclass(frozen=True)
class Cost:
    """What a call takes: elements of arguments, parameters and results; multiplications and additions."""

    elements: int
    operations: int

    def within(self, elements: float, operations: float) -> bool:
        """Say whether it is at most that."""
        return self.elements <= elements and self.operations <= operations


def cost(program: Program) -> Cost | None:
    """Return what a call takes, without computing it; None if it does not run on meta tensors."""
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model, inputs = program.model("meta"), program.inputs("meta")
            results = model(*inputs)
    except Exception:
        return None
    leaves = torch.utils._pytree.tree_leaves((inputs, results, list(model.parameters())))
    elements = sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))
    return Cost(elements, counter.get_total_flops())


def smaller(program: Program, elements: float, operations: float) -> Program:
    """Return the program with sizes whose call takes at most so much, as far as it runs with smaller ones.

    elements, operations: Most of a call, as of `Cost`.
    Returns: Integers are halved until they are at most a bound, `SMALLEST` or of `LARGER`; those without
        which the program fails stay as they are, as do all of a program whose cost is not known.
    """
    spent = cost(program)
    if spent is None or spent.within(elements, operations):
        return program
    best = _shrunk(program, SMALLEST)
    for most in LARGER:
        more = _shrunk(program, most)
        spent = cost(more)
        if spent is None or not spent.within(elements, operations):
            break
        best = more
    return best


def _shrunk(program: Program, most: int) -> Program:
    tree = ast.parse(program.path.read_text(encoding="utf-8"))
    numbers = dict.fromkeys(node.value for node in _sizes(tree))
    wanted = {number: _halved(number, most) for number in numbers if number > most}
    kept: dict[int, int] = {}
    for sizes in (wanted, *({k: v for k, v in wanted.items() if k != left} for left in wanted)):
        if cost(Program(program.path, sizes)):
            return Program(program.path, sizes)
    for number, small in wanted.items():
        if cost(Program(program.path, {**kept, number: small})):
            kept[number] = small
    return Program(program.path, kept)


def _halved(number: int, most: int) -> int:
    while number > most:
        number //= 2
    return number
