"""What is rewritten before a graph is partitioned, and in what order."""

from __future__ import annotations

from ladder.ir.graph import Graph
from ladder.rewrite.attention_match import ATTENTION_PATTERNS, REPLACED_SCORES
from ladder.rewrite.attention_rules import ATTENTION_FORMS, QUERY_LAYOUT, TURNED, added_masks
from ladder.rewrite.axis_rules import (
    COLUMNS_FIRST,
    JOIN_FOLDING,
    LAST_REDUCTIONS,
    MERGED_REDUCTIONS,
    ROWS_OF_PRODUCTS,
)
from ladder.rewrite.bounds import BOUND_FOLDING
from ladder.rewrite.centred import CENTRED
from ladder.rewrite.convolution_rules import (
    CHANNEL_GROUPS,
    CHANNELS_LAST,
    CHANNELS_OF_ZEROS,
    FEW_CHANNELS,
    OURS_LAST,
    STILL,
    lone,
)
from ladder.rewrite.counts_of_columns import with_columns
from ladder.rewrite.function_match import FUNCTION_PATTERNS
from ladder.rewrite.identities import (
    CONVERT_FOLDING,
    GROUPED_ATTENTION,
    LAYOUT_FOLDING,
    NEUTRAL_FOLDING,
    OUTER_PRODUCTS,
    RESHAPE_SINKING,
    ROW_SINKING,
)
from ladder.rewrite.merge import merge_all_but_windows, merge_equal, merge_reshaped
from ladder.rewrite.partial_results import computed_in_part
from ladder.rewrite.passes import Pass, rewriting, run_passes
from ladder.rewrite.rules import Rules
from ladder.rewrite.scan_rules import EXCLUSIVE_SCANS
from ladder.rewrite.short_reductions import written_out
from ladder.rewrite.short_windows import with_moved_copies
from ladder.rewrite.slices_of_rows import reduced_in_slices
from ladder.rewrite.transpose_rules import TRANSPOSE_SINKING, WINDOW_ORDER, as_given
from ladder.rewrite.turned_reductions import as_they_lie
from ladder.rewrite.wide_windows import WIDE_WINDOWS
from schedules.attention import has_kernels, is_nvidia
from targets import TileDevice

FOLDING = (
    Pass("merge equal nodes", merge_equal),
    rewriting(
        "fold layouts",
        LAYOUT_FOLDING
        + JOIN_FOLDING
        + CONVERT_FOLDING
        + RESHAPE_SINKING
        + ROWS_OF_PRODUCTS
        + WINDOW_ORDER
        + NEUTRAL_FOLDING
        + BOUND_FOLDING
        + OUTER_PRODUCTS,
    ),
)

GROUPS = (rewriting("heads that share keys", GROUPED_ATTENTION),)

ONE_ELEMENT = rewriting("axes of one element", STILL + LAYOUT_FOLDING)

LAST = (
    ONE_ELEMENT,
    rewriting("long reductions", MERGED_REDUCTIONS + LAYOUT_FOLDING),
    Pass("merge equal nodes again", merge_all_but_windows),
    Pass("libraries look at strides", as_given),
)

ATTENTION = (
    rewriting("views of its operands", LAYOUT_FOLDING),
    rewriting("attention takes in what lies around it", ATTENTION_FORMS),
    rewriting("queries by tokens", QUERY_LAYOUT),
)

TURNING = rewriting("attention writes a token's heads side by side", TURNED)

WINDOWS = Pass("write short windows out", with_moved_copies)

ROWS = (
    rewriting("wide windows in steps", WIDE_WINDOWS),
    rewriting("columns before few neighbours", COLUMNS_FIRST + LAYOUT_FOLDING),
    rewriting("deviations of deviations", CENTRED),
    Pass("compute parts of results", computed_in_part),
    Pass("reduce slices alone", reduced_in_slices),
    Pass("reduce transposed values as they lie", as_they_lie),
    Pass("write short reductions out", written_out),
    rewriting("reductions along the last axis", LAST_REDUCTIONS + LAYOUT_FOLDING),
    rewriting("functions of rows", ROW_SINKING + LAYOUT_FOLDING),
    Pass("merge equal nodes of other axes", merge_reshaped),
    Pass("count beside what is counted", with_columns),
)

SCANNED = rewriting("scans of what is before", EXCLUSIVE_SCANS)

IMAGES = (
    rewriting("few channels", FEW_CHANNELS),
    rewriting("zeros behind channels", CHANNELS_OF_ZEROS),
)


def simplify(graph: Graph, device: TileDevice | None = None, precise: bool = False) -> Graph:
    """Return the graph without what changes nothing; as the device's kernels take attention and images.

    If ``precise``, several operators do not become one: it would round otherwise.
    """
    ours = has_kernels(device)
    matches = () if precise else matching(ours)
    nvidia = is_nvidia(device)
    alone = sum(node.operator == "contract" for node in graph.nodes) == 1
    channels = ordering(OURS_LAST if nvidia else lone(device) if alone else CHANNELS_LAST)
    passes = (*FOLDING, *matches, *GROUPS, channels, *LAST)
    if device is not None and ours:
        masks = rewriting("masks that torch's attention adds", added_masks(device))
        passes = (*passes, *ATTENTION, masks, Pass("merge equal masks", merge_equal))
    if device is not None:
        passes = (*passes, *((TURNING, WINDOWS) if device.kind == "llvm" else (SCANNED, *ROWS)))
    return run_passes(graph, (*passes, *(IMAGES if nvidia else ())))


def ordering(convolutions: Rules) -> Pass:
    """Return what gives convolutions channels last, and moves transposes behind what is computed of them."""
    moving = TRANSPOSE_SINKING + LAYOUT_FOLDING + RESHAPE_SINKING + CHANNEL_GROUPS
    return rewriting("channels last", convolutions + moving)


def matching(ours: bool) -> tuple[Pass, ...]:
    """Return the pattern matches of operators that programs write as several.

    ours: Whether attention has kernels of ours.
    """
    functions = rewriting("match activation functions", FUNCTION_PATTERNS)
    return (functions, rewriting("match attention", ATTENTION_PATTERNS + (() if ours else REPLACED_SCORES)))
