"""Commands about the library and this machine: types, devices, tools and the cache."""

from __future__ import annotations

from typing import Annotated

import typer

from ladder.cli import console
from ladder.cli.options import Json, Markdown, Target


def types(
    explain: Annotated[
        str | None,
        typer.Option(help="Show how a GPU decodes this type; python:module:name names a TType of yours."),
    ] = None,
    target: Target = "cuda/sm_90a",
    as_json: Json = False,
    markdown: Markdown = False,
) -> None:
    """List the types of the library and the activations that multiply them without loss, or explain one."""
    from ladder.cli import tables
    from tile_types import list_types

    if explain is not None:
        from ladder.cli import decoders  # loads TVM and torch, which a list needs not

        rows = decoders.decoder_rows(explain, target)
        if as_json:
            console.print_json({"type": explain, "target": target, "decoders": rows})
        else:
            console.print_table(decoders.COLUMNS, decoders.cells(rows))
            if not rows:
                print(decoders.NONE)
    elif as_json:
        console.print_json({"types": [tables.describe_type(ttype) for ttype in list_types()]})
    elif markdown:
        print(tables.type_markdown())
    else:
        console.print_table(tables.TYPE_COLUMNS, tables.type_rows())


def devices(as_json: Json = False, markdown: Markdown = False) -> None:
    """List the devices that kernels can be compiled for, and what this machine has."""
    from ladder.cli import tables
    from targets import list_devices

    machine = tables.here()
    if as_json:
        known = [tables.describe_device(device) for device in list_devices()]
        console.print_json({"devices": known, "here": machine})
        return
    if markdown:
        print(tables.device_markdown())
        return
    console.print_table(tables.DEVICE_COLUMNS, tables.device_rows())
    shown = [f"#{gpu['ordinal']} {gpu['device'] or 'not supported'}" for gpu in machine["gpus"]]
    cpu = machine["cpu"]
    print(f"\nhere: cpu is {cpu['name']}, {cpu['units']} cores; GPUs: {', '.join(shown) or 'none'}")


def doctor(as_json: Json = False) -> None:
    """Say which tools are here, what each is for and how to get it; fail if `ladder gemm` cannot run."""
    from ladder.cli import doctor as checks

    with console.progress() as step:
        step("looking for tools and trying a kernel")
        findings = checks.diagnose()
    console.show(checks.as_json(findings), as_json, lambda: checks.print_report(findings))
    if not checks.healthy(findings):
        console.error("the main job, `ladder gemm`, cannot run here; the lines above say what it needs")
        raise typer.Exit(console.FAILED)


cache = typer.Typer(help="Look at or empty the cache of compiled kernels.")


@cache.callback(invoke_without_command=True)
def cache_help(context: typer.Context) -> None:
    """Print the help where no command follows."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@cache.command("path")
def cache_path() -> None:
    """Print the folder of the cache."""
    from ladder.installation import cache_root

    print(cache_root())


@cache.command("list")
def cache_list(as_json: Json = False) -> None:
    """List the kernels in the cache."""
    from ladder.cli import tables

    entries = tables.cache_entries()
    console.show(
        {"entries": entries},
        as_json,
        lambda: console.print_table(tables.CACHE_COLUMNS, tables.cache_rows(entries)),
    )


@cache.command("clear")
def cache_clear(as_json: Json = False) -> None:
    """Delete every kernel in the cache."""
    from ladder.runtime.cache import KernelCache

    removed = KernelCache().clear()
    if as_json:
        console.print_json({"removed": removed})
    else:
        print(f"removed {removed} kernel{'' if removed == 1 else 's'}")
