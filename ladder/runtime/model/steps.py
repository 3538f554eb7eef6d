"""The steps of a plan as closures over memory, and the run through them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from ladder.runtime.model.binders import BINDERS, bind_by_torch
from ladder.runtime.model.data_reads import Detached
from ladder.runtime.model.plan import PlanStep
from ladder.runtime.model.workspace import Bound, Workspace
from ladder.runtime.snapshot import Snapshot, identical
from ladder.runtime.threads import keep_apart


class FrameArguments:
    """The arguments of one frame.

    inputs: (slot, position) of each argument that the plan reads.
    plain: Position -> a parameter, and what steps get for it: the same tensor, whatever sizes they are for.
    """

    def __init__(self, inputs: Sequence[tuple[int, int]], plain: dict[int, Detached]) -> None:
        self.inputs, self.plain = tuple(inputs), plain
        self.moving = self.inputs
        """Those that are put into their slots in every call."""
        self.staying: list[int] = []
        """Positions of parameters, and of what is made of them."""
        self.known: list[Any] | None = None
        self.addresses: list[int] = []
        self.snapshot = Snapshot()

    def put(self, values: Sequence[Any], slots: list[Any], made: int) -> None:
        """Fill the slots: kernels take plain tensors, not parameters.

        values: The arguments of a call.
        slots: Of the frame.
        made: Position of the first argument that is made of others.
        """
        known, staying = self.known, self.staying
        if known is None or (staying and not self._stay([values[at] for at in staying], known)):
            self._learn(values, slots, made)
        for slot, at in self.moving:
            value = values[at]
            slots[slot] = value.detach() if value.requires_grad else value

    def drop(self, slots: list[Any]) -> None:
        """Forget what may be another tensor in the next call."""
        for slot, _ in self.moving:
            slots[slot] = None

    def _stay(self, given: list[Any], known: list[Any]) -> bool:
        return self.snapshot.confirm(
            given,
            lambda: identical(given, known) and [*map(torch.Tensor.data_ptr, given)] == self.addresses,
        )

    def _learn(self, values: Sequence[Any], slots: list[Any], made: int) -> None:
        stays = [(slot, at) for slot, at in self.inputs if at >= made or values[at].requires_grad]
        self.moving = tuple(pair for pair in self.inputs if pair not in stays)
        self.staying = [at for _, at in stays]
        self.known = [values[at] for at in self.staying]
        self.addresses = [*map(torch.Tensor.data_ptr, self.known)]
        self.snapshot = Snapshot()
        for slot, at in stays:
            slots[slot] = self._plain(at, values[at])

    def _plain(self, at: int, value: Any) -> Any:
        """Return a parameter as a tensor that asks for no gradient."""
        if not value.requires_grad:
            return value
        found = self.plain.get(at)
        if found is None or not found.is_of(value):
            found = self.plain[at] = Detached(value)
        return found.tensor


class Steps:
    """All steps of a plan, bound to memory: one call at a time runs them.

    memory: Slots and buffers.
    by_torch: Kinds of steps that torch runs in place of our kernels.
    """

    def __init__(self, memory: Workspace, by_torch: Collection[str] = ()) -> None:
        self.memory, self.owner = memory, memory.owner
        self.by_torch = by_torch
        slot, plan = memory.slot, self.owner.plan
        moving = {name: at for name, at in self.owner.bindings.items() if name not in self.owner.owned}
        self.given = FrameArguments([(slot[name], at) for name, at in moving.items()], memory.plain)
        self.numbers: list[int] = []
        """Of the steps that every call runs."""
        self.bound = self._bound(set(moving))
        """These steps, each with the slots that nothing reads after it."""
        self.outputs = [slot[value] for value in plan.outputs]
        mine = memory.shown - memory.constants - memory.still - set(self.owner.bindings)
        self.results = [slot[value] for value in mine if value in slot]
        self.lasting = memory.lasting()
        self.on_cpu = self.owner.where.type == "cpu"

    def _bound(self, moving: set[str]) -> list[tuple[Bound, tuple[int, ...]]]:
        plan = self.owner.plan
        found, computed = [], False
        for number, step in enumerate(plan.steps):
            if step.constant:
                computed |= self._settle(step)
            elif (bound := self._call_of(step)) is not None:
                self.numbers.append(number)
                found.append((bound, tuple(self._dead(number, moving))))
        if computed and not self.owner.is_recorded():
            self._keep_constants()
        return found

    def _call_of(self, step: PlanStep) -> Bound | None:
        kind = step.part.kind
        return (bind_by_torch if kind in self.by_torch else BINDERS[kind])(self.memory, step)

    def _settle(self, step: PlanStep) -> bool:
        """Put what a constant step makes into its slots; tells whether it had to be computed."""
        memory, values = self.memory, step.part.outputs
        if known := all(value in self.owner.constants for value in values):
            for value in values:
                memory.slots[memory.slot[value]] = self.owner.constants[value]
        elif (bound := BINDERS[step.part.kind](memory, step)) is not None:
            bound(memory.slots)
        return not known

    def _keep_constants(self) -> None:
        """Let other frames, which may work in other streams, use the constants of this one."""
        memory, steps = self.memory, self.owner.plan.steps
        if self.owner.where.type == "cuda":
            torch.cuda.current_stream(self.owner.where).synchronize()
        values = [value for step in steps if step.constant for value in step.part.outputs]
        self.owner.constants.update((value, memory.slots[memory.slot[value]]) for value in values)

    def _dead(self, number: int, moving: set[str]) -> set[int]:
        """Return the slots that nothing reads after a step, and that are not to stay as they are."""
        memory, plan = self.memory, self.owner.plan
        part = plan.steps[number].part
        return {
            memory.slot[value]
            for value in (*part.inputs, *part.outputs)
            if value in memory.slot
            and plan.last_use[value] <= number
            and value not in memory.constants
            and value not in memory.still
            and value not in moving
        }

    def run(self, values: Sequence[Any]) -> list[Any]:
        """Run every step with the arguments of a call; returns the graph's outputs."""
        slots, self.memory.values = self.memory.slots, values
        self.given.put(values, slots, self.owner.made_from(values))
        if self.on_cpu:
            keep_apart()
            self.memory.watch.look()
        for step, dead in self.bound:
            step(slots)
            for slot in dead:
                slots[slot] = None
        found = [slots[at] for at in self.outputs]
        if self.owner.copied:
            self._update(values, found)
        for at in self.lasting:
            found[at] = found[at].clone()  # the caller may write into what it gets
        self.given.drop(slots)
        for slot in self.results:
            slots[slot] = None
        self.memory.values = ()
        return found

    def _update(self, values: Sequence[Any], found: Sequence[Any]) -> None:
        """Let arguments take outputs; the executable counts that they were written."""
        targets, taken = (
            [values[at] for at, _ in self.owner.copied],
            [found[at] for _, at in self.owner.copied],
        )
        counted = tuple(target for target in targets if not target.is_inference())
        with torch.autograd.grad_mode._unsafe_preserve_version_counter(counted):
            if any(target.is_conj() for target in targets):  # torch takes no lists of them
                for target, value in zip(targets, taken, strict=True):
                    target.copy_(value)
            else:
                torch._foreach_copy_(targets, taken)
