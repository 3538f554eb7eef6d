"""Assembly of a kernel as instructions: mnemonic, operands, modifiers, and the registers that each names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tile_types.errors import LadderError


class GcnError(LadderError):
    """Machine code that the emulator cannot execute."""


VECTOR, ACCUMULATION, SCALAR = 0, 256, 512
"""Where the numbers of VGPRs, AGPRs and SGPRs begin in sets of registers."""

BASES = {"v": VECTOR, "a": ACCUMULATION, "s": SCALAR}
VCC, M0, NULL, EXEC, TEMPORARY = 106, 124, 125, 126, 108
"""Places of special registers among the SGPRs; ``ttmp0`` is the first of the temporary ones."""

NAMED = {"vcc": (VCC, 2), "vcc_lo": (VCC, 1), "vcc_hi": (VCC + 1, 1), "exec": (EXEC, 2), "m0": (M0, 1)}
NAMED |= {"exec_lo": (EXEC, 1), "exec_hi": (EXEC + 1, 1), "null": (NULL, 1)}
NAMED |= {f"ttmp{i}": (TEMPORARY + i, 1) for i in range(16)}

REGISTER = re.compile(r"([vas])(?:(\d+)(\.[lh])?|\[(\d+):(\d+)\])")
MODIFIER = re.compile(r"\b([a-z]\w*):(\[[^\]]*\]|\S+)")
FLAGS = {
    "off",
    "offen",
    "glc",
    "slc",
    "sc0",
    "sc1",
    "nt",
    "clamp",
    "row_mirror",
    "row_half_mirror",
    "gds",
    "lds",
}
SUFFIXES = ("_e32", "_e64_dpp", "_e64", "_dpp", "_sdwa")


@dataclass(frozen=True)
class Operand:
    """One operand.

    kind: ``"v"``, ``"a"``, ``"s"``, or ``"literal"``.
    index, count: First register and number of registers.
    text: A literal as it is written.
    negated, absolute, extended: Modifiers of a source: ``-``, ``|x|`` and ``sext(x)``.
    half: ``".l"`` or ``".h"`` where half of a register is meant.
    """

    kind: str
    index: int = 0
    count: int = 1
    text: str = ""
    negated: bool = False
    absolute: bool = False
    extended: bool = False
    half: str = ""

    @property
    def registers(self) -> frozenset[int]:
        if self.kind == "literal":
            return frozenset()
        first = BASES[self.kind] + self.index
        return frozenset(range(first, first + self.count))


@dataclass(frozen=True)
class Instruction:
    """One line.

    text: As it was written.
    op: Mnemonic without the suffix of its encoding.
    form: The suffix: ``"e32"``, ``"e64"``, ``"dpp"``, ``"e64_dpp"``, ``"sdwa"`` or nothing.
    operands, modifiers: What follows; a flag's value is empty.
    """

    text: str
    op: str
    form: str
    operands: tuple[Operand, ...]
    modifiers: Mapping[str, str]

    @property
    def registers(self) -> frozenset[int]:
        return frozenset().union(*(operand.registers for operand in self.operands))

    def bits(self, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """Return a modifier that is a list of numbers; what the list lacks is as in the default."""
        given = tuple(map(int, re.findall(r"-?\d+", self.modifiers.get(name, ""))))
        return given + default[len(given) :]

    def number(self, name: str, default: int = 0) -> int:
        return int(self.modifiers[name], 0) if name in self.modifiers else default


INLINE = {"0.5", "1.0", "2.0", "4.0", "0.15915494", "0.15915494309189532"}
"""Floating-point constants that take no bytes of their own, beside their negatives."""

SHORT = (
    "s_movk_",
    "s_addk_",
    "s_mulk_",
    "s_cmpk_",
    "s_nop",
    "s_waitcnt",
    "s_setprio",
    "s_sleep",
    "s_cbranch",
    "s_branch",
)
"""Scalar instructions whose operand lies within their four bytes."""

LONG = ("s_load", "ds_", "global_", "scratch_", "buffer_")
"""Instructions of eight bytes, whatever their operands."""

ALONE = {"v_readfirstlane_b32", "v_accvgpr_mov_b32", "v_nop"}
"""Vector instructions of four bytes that are written without a suffix."""


def encoded_bytes(i: Instruction) -> int:
    """Return the bytes of an instruction's encoding (CDNA3 ISA, "Microcode Formats")."""
    if i.op.startswith(LONG):
        return 8
    if i.op.startswith("v_mfma_scale"):  # the scales are an instruction of their own
        return 16
    if i.op.startswith(SHORT):
        return 4
    if i.op.startswith("v_") and i.form != "e32" and i.op not in ALONE:
        return 8
    return 8 if i.op.startswith(("v_fmaak", "v_fmamk")) or any(map(takes_bytes, i.operands)) else 4


def takes_bytes(operand: Operand) -> bool:
    """Tell whether an operand is a constant that follows its instruction."""
    text = operand.text
    if operand.kind != "literal" or text.lstrip("-") in INLINE:
        return False
    return not (re.fullmatch(r"-?\d+", text) and -16 <= int(text) <= 64)


@dataclass
class Listing:
    """A kernel's code.

    name: Its symbol.
    instructions: In order.
    labels: Label -> index of the instruction behind it.
    aligned: Index of an instruction -> bytes that its place is a multiple of, as loops begin.
    settings: ``.amdhsa_`` directive -> number.
    offsets: Where its arguments lie in the kernarg segment, and their bytes.
    """

    name: str
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    aligned: dict[int, int] = field(default_factory=dict)
    settings: dict[str, int] = field(default_factory=dict)
    offsets: list[tuple[int, int]] = field(default_factory=list)


def parse_operand(text: str) -> Operand:
    """Read one operand."""
    negated = text.startswith("-") and not re.fullmatch(r"-[\d.].*", text)
    body = text[1:] if negated else text
    absolute = body.startswith("|")
    extended = body.startswith("sext(")
    body = body.strip("|") if absolute else body[5:-1] if extended else body
    if body in NAMED:
        index, count = NAMED[body]
        return Operand("s", index, count, negated=negated, absolute=absolute)
    match = REGISTER.fullmatch(body)
    if match is None:
        return Operand("literal", text=body)
    first = int(match[2] or match[4])
    last = int(match[2] or match[5])
    return Operand(match[1], first, last - first + 1, "", negated, absolute, extended, match[3] or "")


def parse_instruction(line: str) -> Instruction:
    """Read one line without comments."""
    if " :: " in line:
        parts = [parse_instruction(part) for part in line.split(" :: ")]
        return Instruction(line, "v_dual", "", (*parts[0].operands, *parts[1].operands), {})
    op, _, rest = line.partition(" ")
    modifiers = dict(MODIFIER.findall(rest))
    rest = MODIFIER.sub("", rest)
    words = re.split(r"[,\s]+(?![^\[]*\])", rest.strip()) if rest.strip() else []
    modifiers |= {word: "" for word in words if word in FLAGS}
    form = next((suffix for suffix in SUFFIXES if op.endswith(suffix)), "")
    operands = tuple(parse_operand(word) for word in words if word not in FLAGS)
    return Instruction(line, op.removesuffix(form), form[1:], operands, modifiers)


def parse_listing(assembly: str, kernel: str) -> Listing:
    """Read the code, the settings and the arguments of one kernel from an assembly file.

    Raises GcnError if the file has no such kernel.
    """
    body = re.search(rf"^{re.escape(kernel)}:.*?$(.*?)^\s*\.section", assembly, re.MULTILINE | re.DOTALL)
    settings = re.search(rf"\.amdhsa_kernel {re.escape(kernel)}$(.*?)\.end_amdhsa_kernel", assembly,
                         re.MULTILINE | re.DOTALL)  # fmt: skip
    if body is None or settings is None:
        raise GcnError(f"the assembly has no kernel {kernel!r}")
    listing = Listing(kernel)
    for raw in body[1].splitlines():
        line = re.sub(r"\s+", " ", raw.split(";")[0]).strip()
        if line.endswith(":"):
            listing.labels[line[:-1]] = len(listing.instructions)
        elif line.startswith(".p2align"):
            listing.aligned[len(listing.instructions)] = 1 << int(line.split()[1].rstrip(","))
        elif line and not line.startswith("."):
            listing.instructions.append(parse_instruction(line))
    listing.settings = {name: int(value) for name, value in re.findall(r"\.amdhsa_(\w+) (\d+)", settings[1])}
    listing.offsets = _argument_offsets(assembly, kernel)
    return listing


def _argument_offsets(assembly: str, kernel: str) -> list[tuple[int, int]]:
    """Return offset and size of each visible argument, as the metadata has them."""
    for entry in re.split(r"^  - (?=\.agpr_count|\.args)", assembly, flags=re.MULTILINE)[1:]:
        if re.search(rf"^\s+\.name:\s+{re.escape(kernel)}$", entry, re.MULTILINE):
            found = re.findall(r"\.offset:\s+(\d+)\s+\.size:\s+(\d+)\s+\.value_kind:\s+(\w+)", entry)
            return [(int(at), int(size)) for at, size, kind in found if not kind.startswith("hidden")]
    raise GcnError(f"the assembly has no metadata of kernel {kernel!r}")
