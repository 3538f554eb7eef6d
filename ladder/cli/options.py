"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

Weight = Annotated[
    str, typer.Option(help="Weight type, see `ladder types`, or python:module:name of a TType of yours.")
]
Activation = Annotated[
    str | None, typer.Option(help="Activation type. [default: bfloat16, float16 where the target lacks it]")
]
GroupSize = Annotated[
    int | None,
    typer.Option(help="Elements along K per scale; -1 for one per row. [default: the type's own, else 128]"),
]
MOST_EXTENT = (1 << 31) - 1
Rows = Annotated[int, typer.Option("-m", help="Rows of the activations (tokens).", min=0, max=MOST_EXTENT)]
Outputs = Annotated[int, typer.Option("-n", help="Rows of the weight (outputs).", min=1, max=MOST_EXTENT)]
Inputs = Annotated[int, typer.Option("-k", help="Columns of the weight (inputs).", min=1, max=MOST_EXTENT)]
Zero = Annotated[str, typer.Option(help="Zero points: none, integer or float.")]
Bias = Annotated[bool, typer.Option("--bias/--no-bias", help="Add a bias vector.")]
Epilogue = Annotated[str, typer.Option(help="Element-wise operators applied last, separated by commas.")]
Output = Annotated[str | None, typer.Option(help="Result type. [default: the activation's, if 16 bits wide]")]
Target = Annotated[str, typer.Option(help="Device to compile for; see `ladder devices`.")]
MOST_SEED = (1 << 63) - 1
Seed = Annotated[int, typer.Option(help="Seed of the random weights and activations.", min=0, max=MOST_SEED)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print a markdown table, as in the READMEs.")]
Searched = Annotated[
    str,
    typer.Option(help="rmsnorm_matmul, gated_mlp, lora, gqa, qknorm_attention or ntrans."),
]
Trials = Annotated[
    int,
    typer.Option(
        help="Kernels to build for the target, best first by a model: run and timed if it is here,"
        " else the first one is simulated.",
        min=0,
    ),
]
