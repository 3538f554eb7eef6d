"""The commands and their options. Everything heavy is imported by the command that needs it."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.exceptions import TyperException

from ladder.cli import console
from ladder.cli.console import FAILED, OK, USAGE
from ladder.cli.here import cache, devices, doctor, types
from ladder.cli.options import (
    MOST_SEED,
    Activation,
    Bias,
    Epilogue,
    GroupSize,
    Inputs,
    Json,
    Output,
    Outputs,
    Rows,
    Searched,
    Seed,
    Target,
    Trials,
    Weight,
    Zero,
)

app = typer.Typer(
    name="ladder",
    help="Compile models and matrix products with weights of any low-bit type, and look inside.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log each step, and errors in full.")
    ] = False,
) -> None:
    """Set up logging; without a command, print the help."""
    console.log_to_stderr(verbose)
    if version:
        from ladder.installation import ladder_version

        print(ladder_version())
        raise typer.Exit(OK)
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def gemm(
    weight: Weight = "int4",
    activation: Activation = None,
    group_size: GroupSize = None,
    m: Rows = 1,
    n: Outputs = 4096,
    k: Inputs = 4096,
    zero: Zero = "none",
    bias: Bias = False,
    epilogue: Epilogue = "",
    output: Output = None,
    target: Target = "cpu",
    check: Annotated[
        bool,
        typer.Option(help="Compare the result with float64; for a GPU, also simulate the kernel on the CPU."),
    ] = True,
    as_json: Json = False,
    seed: Seed = 0,
    experts: Annotated[
        int, typer.Option(help="So many products in one launch, each of up to M tokens.", min=0)
    ] = 0,
    masked: Annotated[
        bool, typer.Option("--masked", help="Experts' tokens lie in [E, M, K] and not one after the other.")
    ] = False,
) -> None:
    """Compile C[M,N] = A[M,K] · B[N,K]ᵀ with low-bit B, run, check and time it beside torch."""
    from ladder.cli.gemm import run_gemm
    from ladder.cli.problem import Problem

    names = _names(epilogue)
    problem = Problem(
        weight, activation, group_size, m, n, k, zero, bias, names, output, target, seed, experts, masked
    )
    with console.progress() as step:
        report = run_gemm(problem, check=check, step=step)
    console.show(report.as_json(), as_json, lambda: console.print_fields(report.as_text()))
    if report.passed is False:
        console.error(report.failure)
        raise typer.Exit(FAILED)


@app.command()
def explain(
    program: Annotated[
        str,
        typer.Argument(
            help="python:module:function, which returns a model and arguments: explain how it is captured."
            " Without it, a product is explained."
        ),
    ] = "",
    guards: Annotated[bool, typer.Option(help="Of a program: print every condition of its guards.")] = False,
    stage: Annotated[
        str | None,
        typer.Option(
            help="Print this stage: ir, schedule, tir; for GPUs of NVIDIA cuda, ptx, sass; of AMD asm;"
            " for CPUs tile, llvm, asm."
        ),
    ] = None,
    weight: Weight = "int4",
    activation: Activation = None,
    group_size: GroupSize = None,
    m: Rows = 1,
    n: Outputs = 4096,
    k: Inputs = 4096,
    zero: Zero = "none",
    bias: Bias = False,
    epilogue: Epilogue = "",
    output: Output = None,
    target: Target = "cpu",
    as_json: Json = False,
) -> None:
    """Show how a program is captured, or how a product is compiled: for every M, or one stage of one."""
    from ladder.cli.explain import explain_program, explain_stage, explain_summary
    from ladder.cli.problem import Problem
    from tile_types.errors import ParseError

    if stage if program else guards:
        raise ParseError("--stage is of a product, --guards of a program python:module:function")
    problem = Problem(weight, activation, group_size, m, n, k, zero, bias, _names(epilogue), output, target)
    with console.progress() as step:
        step(f"compiling for {target}")
        if program:
            text, evidence = explain_program(program, target, guards=guards), None
        elif stage is None:
            text, evidence = explain_summary(problem)
        else:
            text, evidence = explain_stage(problem, stage), None
    if as_json:
        found = None if evidence is None else evidence.as_json()
        console.print_json({"target": target, "stage": stage, "text": text, "evidence": found})
    else:
        print(text)


@app.command()
def tune(
    weight: Weight = "int4",
    activation: Activation = None,
    group_size: GroupSize = None,
    zero: Zero = "none",
    shapes: Annotated[str, typer.Option(help="Shapes to tune: NxK, separated by commas.")] = "4096x4096",
    tokens: Annotated[str, typer.Option("-m", help="M to tune, separated by commas. [1 to 8192]")] = "",
    target: Target = "cuda/sm_90a",
    kernels: Annotated[int, typer.Option(help="Candidates to compile first.", min=1)] = 48,
    seconds: Annotated[float, typer.Option(help="Begin no second round after this.", min=0)] = 40.0,
    jobs: Annotated[int, typer.Option(help="Compiler processes. [one per core]", min=0)] = 0,
    compile_only: Annotated[
        bool, typer.Option("--compile-only", help="Only compile, into --output: needs no GPU.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Folder of trials for another machine.")] = None,
    measure: Annotated[
        Path | None, typer.Option(help="Measure this folder of trials; compile nothing.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure schedules on a GPU and remember the fastest: never needed for correct results."""
    from ladder.cli import tune as tuning
    from ladder.cli.problem import Problem
    from tile_types.errors import ParseError

    if compile_only != (output is not None):
        raise ParseError("--compile-only and --output DIR go together")
    with console.progress() as step:
        if measure is not None:
            found = tuning.measure_folder(measure, step)
        else:
            problem = Problem(weight, activation, group_size, zero=zero, target=target)
            campaign = tuning.campaign_for(problem, shapes, tokens)
            effort = tuning.parse_effort(kernels, seconds)
            if output is not None:
                found = tuning.compile_only(campaign, output, effort, jobs, step)
            else:
                found = tuning.run_tune(campaign, effort, jobs, step)
    if as_json:
        console.print_json(found.as_json())
    elif output is not None:
        print(f"{found.kernels} kernels in {found.folder}; measure them with `ladder tune --measure`")
    else:
        console.print_table(tuning.COLUMNS, found.as_rows())


@app.command()
def superopt(
    program: Searched = "rmsnorm_matmul",
    operators: Annotated[
        int | None, typer.Option(help="Most operators of a block graph. [the program's]", min=1, max=14)
    ] = None,
    most_kernels: Annotated[
        int, typer.Option("--kernels", help="Most kernels: the block graph and those before.", min=1)
    ] = 1,
    loops: Annotated[int, typer.Option(help="Most dimensions of a block graph's loop.", min=0, max=3)] = 1,
    sizes: Annotated[str, typer.Option(help="Sizes other than the program's, e.g. B=8,K=2048.")] = "",
    weight: Annotated[str, typer.Option(help="Weight type, such as int4, nf4 or mxfp4.")] = "float16",
    group_size: Annotated[int, typer.Option(help="Weights that share a scale.", min=1)] = 128,
    target: Target = "cuda/sm_90a",
    trials: Trials = 1,
    seconds: Annotated[float, typer.Option(help="Time budget of the search.", min=0)] = 600.0,
    jobs: Annotated[int, typer.Option(help="Processes.", min=1)] = 2,
    pruning: Annotated[bool, typer.Option(help="Prune by abstract expressions.")] = True,
    checkpoint: Annotated[Path | None, typer.Option(help="File to go on from and to write to.")] = None,
    show: Annotated[Path | None, typer.Option(help="Write an HTML page with drawings to this file.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the proofs. [fresh entropy]", min=0, max=MOST_SEED)
    ] = None,
    reuse: Annotated[
        bool, typer.Option("--reuse", help="Take what the same search found before; keep what this finds.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Search fused block graphs for a program, prove them equal to it, build and check their kernels."""
    from ladder.cli import superopt as command
    from tile_types.files import require_writable

    for path in filter(None, (show, checkpoint)):
        require_writable(path)
    with console.progress() as step:
        report = command.run_superopt(
            program, operators=operators, kernels=most_kernels, loops=loops, seconds=seconds, jobs=jobs,
            pruning=pruning, weight=weight, group=group_size, target=target, sizes=sizes,
            checkpoint=checkpoint, seed=seed, reuse=reuse, step=step,
        )  # fmt: skip
        kernels, problem = command.kernels_of(report, target, trials, seed or 0, step)
    if show is not None:
        from ladder.superopt.show import page

        write_page(show, page(report))
    console.show(command.as_json(report, kernels), as_json, lambda: command.print_report(report, kernels))
    if problem:
        console.error(problem)
        raise typer.Exit(FAILED)


@app.command("compile")
def compile_model(
    model: Annotated[
        str,
        typer.Argument(help="An ONNX model, or python:module:function (it returns the model and arguments)."),
    ],
    output: Annotated[Path | None, typer.Option(help="The file. [the model's name].ladder")] = None,
    target: Annotated[str, typer.Option(help="Device of this machine. [the example's, else its CPU]")] = "",
    as_json: Json = False,
) -> None:
    """Compile a whole model into one file that `ladder.load` runs without its source or a compiler."""
    from ladder.cli.compile import as_fields, run_compile

    with console.progress() as step:
        found = run_compile(model, output, target, step)
    console.show(found, as_json, lambda: console.print_fields(as_fields(found)))


@app.command()
def inspect(
    checkpoint: Annotated[
        str, typer.Argument(help="A folder, an index, or a .safetensors, .gguf, .pt or .bin file.")
    ],
    as_json: Json = False,
) -> None:
    """List the tensors of a checkpoint: format, shape, bytes; nothing but headers is read."""
    from ladder.cli.formats import COLUMNS, as_rows, run_inspect

    found = run_inspect(checkpoint)
    console.show(found, as_json, lambda: console.print_table(COLUMNS, as_rows(found)))


@app.command()
def convert(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint of another tool, as for `ladder inspect`.")],
    output: Annotated[Path, typer.Argument(help="The file to write, a .safetensors.")],
    as_json: Json = False,
) -> None:
    """Write a checkpoint of another tool in Ladder's own storage, bit for bit, one tensor at a time."""
    from ladder.cli.formats import as_fields, run_convert

    with console.progress() as step:
        found = run_convert(checkpoint, output, step)
    console.show(found, as_json, lambda: console.print_fields(as_fields(found)))


@app.command()
def generate(
    model: Annotated[Path, typer.Argument(help="A folder that transformers reads, with a tokenizer.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    weight: Annotated[
        str, typer.Option(help="Type of the weights, see `ladder types`; none: as the folder has them.")
    ] = "int4",
    group_size: Annotated[int, typer.Option(help="Elements along K per scale; -1 for one per row.")] = 128,
    tokens: Annotated[int, typer.Option(help="Tokens to generate at most.", min=1)] = 64,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], typer.Option(help="Type of the activations.")
    ] = "bfloat16",
    device: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(help="Where. [default: a GPU if there is one]")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0: the likeliest token each time.", min=0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the drawing of tokens.", min=0, max=MOST_SEED)] = 0,
    eager: Annotated[bool, typer.Option("--eager", help="Do not compile: to compare.")] = False,
    as_json: Json = False,
) -> None:
    """Continue a text with a language model, quantized while it is read, and say how fast."""
    from ladder.cli.generate import Request, as_fields, load, run_generate

    request = Request(
        model, prompt, weight, group_size, tokens, dtype, device, temperature, seed, compiled=not eager
    )
    with console.progress() as step:
        ready = load(request, step)
    found = run_generate(request, ready, lambda text: None if as_json else print(text, end="", flush=True))
    if as_json:
        console.print_json(found)
    else:
        print("\n")
        console.print_fields(as_fields(found))


@app.command()
def report(
    model: Annotated[
        str,
        typer.Argument(
            help="An ONNX model, a file that export() wrote, or python:module:function (it returns the model"
            " and example arguments as a tuple)."
        ),
    ],
    output: Annotated[Path | None, typer.Option(help="The page. [the model's name].html")] = None,
    target: Annotated[
        str,
        typer.Option(help="Device; one that is not here gives least times. [the example's, else this CPU]"),
    ] = "",
    sizes: Annotated[
        str, typer.Option(help="Symbolic sizes, e.g. batch=8,seq=128. [the least it takes]")
    ] = "",
    as_json: Json = False,
) -> None:
    """Write a page on a whole model: graph, kernels, their times, roofline, what was fused and why not."""
    from ladder.cli.model_page import page
    from ladder.cli.model_report import COLUMNS, page_path, run_report
    from ladder.cli.superopt import parse_sizes
    from tile_types.files import require_writable

    require_writable(path := output or page_path(model))
    with console.progress() as step:
        found = run_report(model, target, parse_sizes(sizes), step)
    write_page(path, page(found))
    if as_json:
        console.print_json({**found.as_json(), "page": str(path)})
    else:
        console.print_fields(found.as_fields(path))
        console.print_table(COLUMNS, found.as_rows(10), title="the dearest steps")


def write_page(path: Path, text: str) -> None:
    """Write a page; raises ArtifactError if it cannot be."""
    from tile_types.files import replacing

    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


@app.command("first-run")
def first_run(
    output: Annotated[Path, typer.Argument(help="The file to write, a .json.")],
    target: Annotated[str, typer.Option(help="Device of this machine. [its first GPU]")] = "",
    n: Annotated[int, typer.Option(help="Rows of the weights.", min=1)] = 4096,
    k: Annotated[int, typer.Option(help="Columns of the weights.", min=1)] = 4096,
) -> None:
    """Run a kernel of every kind on a GPU that nobody has tried, and write what came of it to one file."""
    from ladder.cli.first_run import run_first, summary

    with console.progress() as step:
        found = run_first(output, target, (n, k), step)
    console.print_fields(dict(summary(found)))
    if not all(row["passed"] for row in found["results"]):
        console.error(f"some failed; {output} has the details, please send it with an issue")
        raise typer.Exit(FAILED)


for command in (types, devices, doctor):
    app.command()(command)
app.add_typer(cache, name="cache")


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code.

    arguments: What follows ``ladder`` on the command line.
    Returns: 0 done, 1 failed, 2 the request itself was wrong.
    """
    for name in ("stdout", "stderr"):  # None where the shell closed them: `ladder types >&-`
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  as long as the process
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper):  # of a terminal that lacks some signs
            stream.reconfigure(errors="backslashreplace" if stream is sys.stderr else "replace")
    try:
        code = int(app(args=list(arguments), prog_name="ladder", standalone_mode=False) or OK)
        sys.stdout.flush()
        return code
    except TyperException as error:
        command = getattr(getattr(error, "ctx", None), "command_path", "ladder")
        console.error(f"{error.format_message()} (see `{command} --help`)")
        return USAGE
    except (BrokenPipeError, SystemExit) as error:
        # The reader of stdout left, as in `ladder types | head -1`, which typer ends with 1: nothing
        # is wrong. Python would complain when it flushes at exit, hence the exchange.
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except (KeyboardInterrupt, typer.Abort):
        console.error("interrupted")
        return FAILED
    except Exception as error:
        from ladder.cli.errors import report

        return report(error)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def command_names() -> tuple[str, ...]:
    """Return the names of all commands, for tests and the README."""
    group: Any = typer.main.get_command(app)
    return tuple(sorted(group.commands))
