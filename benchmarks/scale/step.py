"""The time of one decode step, term by term.

A step is what every sequence needs for one more token. A stage of the pipeline is cut by ``tensor`` GPUs, and
``data`` such groups stand side by side, each with sequences of its own; experts lie over all GPUs of a stage.
Terms of a layer are added, not overlapped: the records of one GPU say that they do not overlap (SCALE.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.scale.machines import NODE, Machine
from benchmarks.scale.shapes import Shape

LAUNCH = (51.63e-6 - 27.45e-6) / 9.5
"""Seconds that a kernel of a decode layer takes beyond its bytes: 8B, `int4`, batch 1 on the H200, 51.63
µs a layer of 9.5 kernels, floor 27.45 (h200_models_2026-11-22.json). All that is fitted to our records."""

KERNELS, EXPERT_KERNELS = 9.5, 4.0
"""Kernels of a decode layer (the same record), and further ones of a layer with experts: routing, order of
tokens, their gathering and their weighted sum (assumed: no record has them)."""

ALL_REDUCE = 10.9e-6
"""Seconds of NCCL's all-reduce of a token's row over two H200, in a graph
(h200_tensor_parallel_2026-11-23.json)."""

HOP = 0.47e-6
"""Seconds of a further step of a ring over NVLink (NCCL, src/graph/tuning.cc: hwLat, NVLINK, ring, LL)."""

EXCHANGE = 14e-6
"""Seconds of an exchange between GPUs before its bytes: fitted with `SUSTAINED` to DeepEP's table."""

SUSTAINED = 0.8
"""Share of a link's peak that large transfers reach: DeepEP's tables have 39 to 46 of 50 GB/s."""

SEND = 10e-6
"""Seconds to hand a stage's rows to the next stage; assumed."""

ACTIVATION, DISPATCHED, KEPT = 2.0, 1.0, 2.0
"""Bytes of a number in results, in tokens on their way to experts (fp8), in the cache."""

RESERVE = 0.9
"""Share of the memory that weights and caches may fill; the rest is for programs, buffers and activations."""


@dataclass(frozen=True)
class Cut:
    """How a model lies over GPUs."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of all stages."""
        return self.tensor * self.pipeline * self.data

    @property
    def stage(self) -> int:
        """GPUs of a stage."""
        return self.tensor * self.data

    def __str__(self) -> str:
        return f"{self.tensor} x {self.pipeline} x {self.data}"


@dataclass(frozen=True)
class Load:
    """What is served: sequences of the whole machine, and tokens in each one's cache."""

    sequences: int
    context: int


@dataclass(frozen=True)
class Terms:
    """Seconds, by what takes them; of a layer or of a step."""

    weights: float = 0.0
    cache: float = 0.0
    products: float = 0.0
    launches: float = 0.0
    sums: float = 0.0
    exchanges: float = 0.0
    sends: float = 0.0

    @property
    def total(self) -> float:
        """Their sum."""
        return float(sum(vars(self).values()))

    @property
    def limit(self) -> str:
        """The largest."""
        return max(vars(self), key=lambda name: getattr(self, name))

    def times(self, count: float) -> Terms:
        """Return all terms so many times."""
        return Terms(**{name: value * count for name, value in vars(self).items()})


def all_reduce(size: float, gpus: int, machine: Machine) -> float:
    """Return the seconds of a ring's all-reduce of ``size`` bytes within a node: 2 (n - 1) steps."""
    if gpus == 1:
        return 0.0
    steps = 2 * (gpus - 1)
    return ALL_REDUCE + (steps - 2) * HOP + steps / gpus * size / (machine.link * SUSTAINED)


def exchange(size: float, gpus: int, machine: Machine) -> float:
    """Return the seconds in which each GPU hands ``size`` bytes evenly to all; the slower way decides."""
    if gpus == 1:
        return 0.0
    near = (min(gpus, NODE) - 1) / gpus * size / machine.link
    far = max(0, gpus - NODE) / gpus * size / machine.network
    return EXCHANGE + max(near, far) / SUSTAINED


def experts_met(shape: Shape, tokens: float) -> float:
    """Return how many of a layer's experts at least one of ``tokens`` takes, all drawn equally often."""
    if not shape.experts:
        return 0.0
    missed: float = (1 - shape.active / shape.experts) ** tokens
    return shape.experts * (1 - missed)


def spread_of(shape: Shape, cut: Cut) -> int:
    """Return over how many GPUs of a stage the experts of a layer lie: further ones hold them again."""
    return min(cut.stage, max(1, shape.experts))


def layer(shape: Shape, machine: Machine, cut: Cut, load: Load, micro: int = 1) -> Terms:
    """Return the terms of a mean layer on one GPU, for one of ``micro`` parts of the sequences."""
    group = load.sequences / cut.data / micro
    stage = load.sequences / micro
    share = shape.expert_layers / shape.layers
    spread = spread_of(shape, cut)
    met = share * experts_met(shape, stage * spread / cut.stage) * shape.expert / spread
    read = (shape.dense / cut.tensor + met) * shape.bits / 8
    attention = shape.attention
    cache = group * attention.seen(load.context) * attention.kept * KEPT
    cache *= attention.copies(cut.tensor) / cut.tensor
    work = 2 * group * shape.dense / cut.tensor + group * attention.work(load.context) / cut.tensor
    work += share * 2 * stage * shape.active * shape.expert / cut.stage
    row = shape.width * ACTIVATION
    sums = all_reduce(group * row, cut.tensor, machine)
    # A group's tokens leave from all its GPUs, each with its part.
    leaving = group * shape.active * shape.width / cut.tensor
    there = exchange(leaving * DISPATCHED, spread, machine)
    back = exchange(leaving * ACTIVATION, spread, machine)
    return Terms(
        weights=read / machine.reads,
        cache=cache / machine.reads,
        products=work / machine.rate,
        launches=(KERNELS + share * EXPERT_KERNELS) * LAUNCH,
        sums=(2 - share) * sums,
        exchanges=share * (there + back),
    )


@dataclass(frozen=True)
class Step:
    """A decode step.

    Parameters
    ----------
    terms
        Seconds by what takes them, until a sequence has its next token.
    idle
        Share of the time that a stage waits for the others: its bubble.
    weights, cache
        Bytes on the fullest GPU.
    fits
        Whether they do.
    rate
        Tokens per second and GPU.
    """

    terms: Terms
    idle: float
    weights: float
    cache: float
    fits: bool
    rate: float


def step(shape: Shape, machine: Machine, cut: Cut, load: Load) -> Step:
    """Return the step of a cut model.

    With p stages the sequences go round in p parts, so that every stage has one; with fewer
    sequences of a group than stages, stages wait.

    Raises
    ------
    ValueError
        If the cut does not fit the model or the node.
    """
    check(shape, cut)
    group = load.sequences / cut.data
    micro = max(1, min(cut.pipeline, int(group)))
    terms = layer(shape, machine, cut, load, micro).times(shape.layers)
    hand_over = SEND + group / micro * shape.width * ACTIVATION / cut.tensor / (machine.network * SUSTAINED)
    head = shape.vocabulary * shape.width * ACTIVATION / cut.tensor / machine.reads
    sends = (cut.pipeline - 1) * hand_over
    terms = replace(terms, weights=terms.weights + head, sends=sends)
    weights, cache = stored(shape, cut, load)
    idle = 1 - micro / cut.pipeline
    return Step(
        terms,
        idle,
        weights,
        cache,
        weights + cache <= RESERVE * machine.capacity,
        load.sequences / terms.total / cut.gpus,
    )


def stored(shape: Shape, cut: Cut, load: Load) -> tuple[float, float]:
    """Return the bytes of weights and of caches on the fullest GPU: one of the first stage."""
    layers = -(-shape.layers // cut.pipeline)
    experts = shape.expert_layers / shape.layers * shape.experts * shape.expert / spread_of(shape, cut)
    embeddings = (1 if cut.pipeline > 1 else 2) * shape.vocabulary * shape.width * ACTIVATION / cut.tensor
    weights = layers * (shape.dense / cut.tensor + experts) * shape.bits / 8 + embeddings
    attention = shape.attention
    kept = load.sequences / cut.data * attention.seen(load.context) * attention.kept * KEPT
    return weights, layers * kept * attention.copies(cut.tensor) / cut.tensor


def check(shape: Shape, cut: Cut) -> None:
    """Refuse cuts that no machine of nodes of `NODE` GPUs has, or that the model does not allow."""
    if min(cut.tensor, cut.pipeline, cut.data) < 1:
        raise ValueError(f"a cut needs at least one GPU in each direction, got {cut}")
    if cut.tensor > NODE or shape.attention.heads % cut.tensor:
        raise ValueError(f"{shape.attention.heads} heads are not cut by {cut.tensor} GPUs of nodes of {NODE}")
    if cut.pipeline > shape.layers:
        raise ValueError(f"{shape.layers} layers make no {cut.pipeline} stages")


def prefill_idle(stages: int, parts: int) -> float:
    """Return the share of a pipeline's time that stages wait while ``parts`` of a prompt pass once."""
    return (stages - 1) / (stages - 1 + parts)


def best(shape: Shape, machine: Machine, gpus: int, load: Load, most: float) -> tuple[Cut, Step] | None:
    """Return the cut with the most tokens per second of those that fit and take at most ``most`` seconds.

    Where none is quick enough the quickest is taken, where none fits None.
    """
    found = []
    sizes = [1 << power for power in range(gpus.bit_length())]
    for tensor in (size for size in sizes if size <= NODE and not shape.attention.heads % size):
        for pipeline in (size for size in sizes if tensor * size <= gpus and size <= shape.layers):
            cut = Cut(tensor, pipeline, gpus // tensor // pipeline)
            found.append((cut, step(shape, machine, cut, load)))
    found = [(cut, made) for cut, made in found if made.fits]
    quick = [(cut, made) for cut, made in found if made.terms.total <= most]
    if quick:
        return max(quick, key=lambda pair: pair[1].rate)
    return min(found, key=lambda pair: pair[1].terms.total, default=None)
