"""Altered files: exported operators and models, and ONNX models, changed at random; what loading them does.

``python tests/integration/altered_files.py --count 1000`` alters each kind so often, prints what came of it,
and fails where anything but one `LadderError` or a result came, took longer than 2 s or more than 1 GB, or
wrote outside of the cache. Each file is loaded and run in a worker process, so that a crash counts as one
fault.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import struct
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import ladder
from ladder.runtime import archive

SECONDS, BYTES = 2.0, 1 << 30
"""What one file may take: of processor time, so that other processes do not count, and of memory."""

PATIENCE = 60.0
"""Seconds after which a worker counts as hanging."""


@dataclass(frozen=True)
class Outcome:
    """What came of one file."""

    kind: str
    text: str
    seconds: float
    growth: int


# what is altered --------------------------------------------------------------------------------------


def inputs() -> tuple[torch.Tensor, ...]:
    return (torch.linspace(-2, 2, 3 * 64).reshape(3, 64),)


def exported(folder: Path) -> dict[str, Path]:
    """Return files of an operator and of two models."""
    torch.manual_seed(0)
    weight = ladder.quantize(torch.randn(48, 64), "int4", group_size=32)
    op = ladder.Matmul(48, 64, "int4", activation="float32", output="float32", group_size=32)
    layers = torch.nn.Linear(64, 32), torch.nn.GELU(), torch.nn.Linear(32, 16), torch.nn.Softmax(-1)
    model = torch.nn.Sequential(*layers).eval()
    quantized = ladder.quantize_(
        torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.SiLU()).eval(), "int4", group_size=32
    )
    with torch.no_grad():
        return {
            "operator": op.export(folder / "operator.ladder", op.pack(weight)),
            "model": ladder.compile(model).export(folder / "model.ladder", *inputs()),
            "quantized": ladder.compile(quantized).export(folder / "quantized.ladder", *inputs()),
        }


def onnx_files(folder: Path) -> dict[str, Path]:
    """Return ONNX models: a network with weights inside, and one with operators of many kinds."""
    generator = np.random.default_rng(0)

    def stored(name: str, array: Any) -> Any:
        return numpy_helper.from_array(np.asarray(array), name)

    float_, node, info = onnx.TensorProto.FLOAT, helper.make_node, helper.make_tensor_value_info
    net = helper.make_graph(
        [
            node("Gemm", ["x", "w", "b"], ["h"], transB=1),
            node("Relu", ["h"], ["r"]),
            node("MatMul", ["r", "v"], ["m"]),
            node("Softmax", ["m"], ["y"], axis=-1),
        ],
        "net",
        [info("x", float_, ["batch", 64])],
        [info("y", float_, ["batch", 8])],
        [
            stored("w", generator.standard_normal((32, 64)).astype(np.float32)),
            stored("b", np.zeros(32, np.float32)),
            stored("v", generator.standard_normal((32, 8)).astype(np.float32)),
        ],
    )
    moves = helper.make_graph(
        [
            node("Reshape", ["x", "shape"], ["r"]),
            node("Transpose", ["r"], ["t"], perm=[0, 2, 1]),
            node("Slice", ["t", "start", "end", "axis"], ["s"]),
            node("Concat", ["s", "s"], ["c"], axis=1),
            node("ReduceMean", ["c", "axis"], ["d"], keepdims=1),
            node("Sub", ["c", "d"], ["e"]),
            node("Clip", ["e", "low", "high"], ["f"]),
            node("Split", ["f", "parts"], ["g", "k"], axis=1),
            node("Unsqueeze", ["g", "axis"], ["u"]),
            node("Expand", ["u", "wide"], ["p"]),
            node("Gather", ["p", "index"], ["y"], axis=0),
        ],
        "moves",
        [info("x", float_, [3, 64])],
        [info("y", float_, [2, 4, 8, 8])],
        [
            *(stored(n, v) for n, v in {"shape": [3, 8, 8], "start": [0], "end": [8], "axis": [1]}.items()),
            *(stored(n, v) for n, v in {"parts": [8, 8], "wide": [3, 4, 8, 8], "index": [2, 0]}.items()),
            stored("low", np.float32(-1)),
            stored("high", np.float32(1)),
        ],
    )
    found = {}
    for graph in (net, moves):
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
        onnx.checker.check_model(model, full_check=True)
        found[graph.name] = folder / f"{graph.name}.onnx"
        onnx.save(model, str(found[graph.name]))
    return found


# alterations ------------------------------------------------------------------------------------------


def flipped(data: bytes, draw: random.Random) -> bytes:
    """Turn one to eight bits."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def truncated(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


def spliced(data: bytes, draw: random.Random) -> bytes:
    """Remove, repeat or overwrite a stretch."""
    start, length = draw.randrange(len(data)), draw.choice((1, 4, 64, 1000))
    middle = draw.choice((b"", data[start : start + length] * 2, draw.randbytes(length)))
    return data[:start] + middle + data[start + length :]


VALUES = (
    *(
        0,
        1,
        -1,
        2,
        7,
        1 << 31,
        1 << 40,
        1 << 62,
        1 << 70,
        1.5,
        float("nan"),
        True,
        None,
        "",
        "x",
        "%x",
        "../x.so",
    ),
    *("float32", "/tmp/x", [], {}, [[]], [1, 2, 3], {"tensor": 0}, {"value": 1}),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in JSON data."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        if isinstance(item, dict | list):
            yield from places(item, (*path, key))


def edited_text(text: str, draw: random.Random) -> str:
    """Change a number or a word of a text, or remove or repeat a piece."""
    at = draw.randrange(len(text) + 1)
    return (
        text[:at]
        + draw.choice(("", "9", "-", "%", "float16", text[at : at + 20]))
        + text[at + draw.choice((0, 1, 5)) :]
    )


def edited_json(value: Any, draw: random.Random) -> Any:
    """Change one to three places in JSON data."""
    changed = json.loads(json.dumps(value))
    for _ in range(draw.choice((1, 1, 1, 3))):
        *path, key = draw.choice(list(places(changed)))
        holder = changed
        for step in path:
            holder = holder[step]
        others = list(holder.values()) if isinstance(holder, dict) else holder
        held = holder[key]
        action = draw.randrange(5)
        if action == 0:
            del holder[key]
        elif action == 1 and isinstance(held, str):
            holder[key] = edited_text(held, draw)
        elif action == 2 and type(held) is int:
            holder[key] = held + draw.choice((-1, 1, 64))
        elif action == 3:
            holder[key] = draw.choice(others)
        else:
            holder[key] = draw.choice(VALUES)
    return changed


def rewritten(path: Path, content: Mapping[str, Any], members: Mapping[str, bytes]) -> bytes:
    """Return an archive whose checksums and digests are right."""
    rest = {name: value for name, value in content.items() if name not in ("signed", "members")}
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        return archive.write(Path(folder) / "x", rest, members).read_bytes()


def json_edited(path: Path, draw: random.Random) -> bytes:
    manifest, members = archive.read(path)
    own = {name: value for name, value in manifest.items() if name not in ("signed", "members")}
    return rewritten(path, edited_json(own, draw), members)


def header_edited(path: Path, draw: random.Random) -> bytes:
    """Edit the header of a member of tensors; digests are right."""
    manifest, members = archive.read(path)
    name = next(name for name in members if name.endswith(".safetensors"))
    data = members[name]
    (length,) = struct.unpack("<Q", data[:8])
    action = draw.randrange(4)
    if action == 0:
        members[name] = struct.pack("<Q", draw.choice((0, 1, length - 1, length + 8, 1 << 40))) + data[8:]
    elif action == 1:
        members[name] = flipped(data[: 8 + length], draw) + data[8 + length :]
    else:
        header = json.dumps(edited_json(json.loads(data[8 : 8 + length]), draw)).encode()
        members[name] = struct.pack("<Q", len(header)) + header + data[8 + length :]
    return rewritten(path, manifest, members)


def members_edited(path: Path, draw: random.Random) -> bytes:
    """Rename, drop or exchange members; digests are right."""
    manifest, members = archive.read(path)
    name, other = draw.choice(list(members)), draw.choice(list(members))
    new = draw.choice(
        ("../x.so", "/tmp/altered.so", "x.so", "stored.safetensors", "a/b.so", "packed.safetensors", "")
    )
    action = draw.randrange(3)
    if action == 0:
        members = {new if held == name else held: data for held, data in members.items()}
    elif action == 1:
        del members[name]
    else:
        members[name] = (
            members[other] if name != other and name.endswith(".so") == other.endswith(".so") else b""
        )
    return rewritten(path, manifest, members)


def duplicated(path: Path, draw: random.Random) -> bytes:
    """Repeat a member or add one, by another writer of zip files."""
    import zipfile

    manifest, members = archive.read(path)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        target = Path(folder) / "x"
        with zipfile.ZipFile(target, "w", draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as other:
            names = ["manifest.json", *members, draw.choice(["../x.so", "manifest.json", *members])]
            for name in names:
                import warnings

                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    data = (
                        json.dumps(manifest).encode() if name == "manifest.json" else members.get(name, b"x")
                    )
                    other.writestr(name, data)
        return target.read_bytes()


def manifest_flipped(path: Path, draw: random.Random) -> bytes:
    """Change bytes of the manifest and make checksum and seal right again."""
    data = path.read_bytes()
    start = len(archive._Entry("manifest.json", 0, 0, 0).local)
    (size,) = struct.unpack("<Q", data[start - 8 : start])
    text = flipped(data[start : start + size], draw)
    head = archive._Entry("manifest.json", size, zlib.crc32(text), 0).local
    return head + text + data[start + size :]


BY_BYTES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "bits": flipped, "cut": truncated, "splice": spliced,
}  # fmt: skip
BY_CONTENT: dict[str, Callable[[Path, random.Random], bytes]] = {
    "json": json_edited, "header": header_edited, "members": members_edited, "twice": duplicated,
    "manifest": manifest_flipped,
}  # fmt: skip


def fields_edited(path: Path, draw: random.Random) -> bytes:
    """Change fields of an ONNX model: names, operators, attributes, shapes, types, tensors, versions."""
    model = onnx.load(str(path))
    graph = model.graph
    for _ in range(draw.choice((1, 1, 2, 4))):
        draw.choice(FIELDS)(graph, model, draw)
    return bytes(model.SerializeToString())


def _rename(graph: Any, model: Any, draw: random.Random) -> None:
    node = draw.choice(graph.node)
    names = draw.choice((node.input, node.output))
    if names:
        every = [name for other in graph.node for name in (*other.input, *other.output)]
        names[draw.randrange(len(names))] = draw.choice((*every, "", "nothing"))


def _operator(graph: Any, model: Any, draw: random.Random) -> None:
    kinds = (
        "Add",
        "Conv",
        "Tile",
        "Range",
        "ConstantOfShape",
        "Squeeze",
        "Pad",
        "If",
        "Loop",
        "Nothing",
        "Where",
    )
    node = draw.choice(graph.node)
    node.op_type = draw.choice((*kinds, *(other.op_type for other in graph.node)))
    node.domain = draw.choice(("", "", "", "ladder", "other"))


def _attribute(graph: Any, model: Any, draw: random.Random) -> None:
    node = draw.choice(graph.node)
    names = (
        "axis",
        "axes",
        "perm",
        "keepdims",
        "transB",
        "alpha",
        "to",
        "split",
        "weight_ttype",
        "group_size",
    )
    value = draw.choice((0, -1, 7, 1 << 40, 1.5, "int4", [0, 1], [5, -9], [1 << 50]))
    name = draw.choice((*names, *(attribute.name for attribute in node.attribute)))
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def _operands(graph: Any, model: Any, draw: random.Random) -> None:
    node = draw.choice(graph.node)
    if draw.random() < 0.5 and node.input:
        del node.input[draw.randrange(len(node.input))]
    else:
        node.input.append(draw.choice(graph.node).input[0])


def _tensor(graph: Any, model: Any, draw: random.Random) -> None:
    tensor = draw.choice(graph.initializer)
    action = draw.randrange(5)
    if action == 0 and tensor.dims:
        tensor.dims[draw.randrange(len(tensor.dims))] = draw.choice((0, 1, 5, -1, 1 << 20, 1 << 40))
    elif action == 1:
        tensor.data_type = draw.choice((0, 1, 6, 7, 8, 9, 10, 11, 14, 16, 22, 99))
    elif action == 2:
        tensor.raw_data = tensor.raw_data[: draw.randrange(len(tensor.raw_data) + 1)]
    elif action == 3 and tensor.data_type == 7:
        huge = draw.choice((-1, 0, 9, 1 << 20, 1 << 33, 1 << 62))
        tensor.raw_data = struct.pack("<q", huge) + tensor.raw_data[8:]
    else:
        tensor.data_location = onnx.TensorProto.EXTERNAL
        place = draw.choice(("../secret", "/etc/hostname", "missing", ".", "net.onnx"))
        entry = tensor.external_data.add()
        entry.key, entry.value = "location", place


def _shape(graph: Any, model: Any, draw: random.Random) -> None:
    info = draw.choice((*graph.input, *graph.output))
    dims = info.type.tensor_type.shape.dim
    action = draw.randrange(4)
    if action == 0 and dims:
        dims[draw.randrange(len(dims))].dim_value = draw.choice((0, 1, -4, 5, 1 << 31, 1 << 60))
    elif action == 1 and dims:
        dims[draw.randrange(len(dims))].dim_param = draw.choice(("n", "n - 1", "batch*batch", "", "(", "1/0"))
    elif action == 2:
        info.type.tensor_type.elem_type = draw.choice((0, 1, 7, 9, 10, 11, 15, 77))
    else:
        info.name = draw.choice(("", "x", "y", "other"))


def _version(graph: Any, model: Any, draw: random.Random) -> None:
    model.opset_import[0].version = draw.choice((0, 1, 7, 13, 14, 21, 22, 1 << 40, -1))
    model.ir_version = draw.choice((1, 3, 9, 99))


def _nodes(graph: Any, model: Any, draw: random.Random) -> None:
    action, node = draw.randrange(3), draw.choice(graph.node)
    if action == 0 and len(graph.node) > 1:
        graph.node.remove(node)
    elif action == 1:
        graph.node.append(node)
    else:
        body = helper.make_graph([node], "inner", [], [])
        node.attribute.append(helper.make_attribute("then_branch", body))


FIELDS = (_rename, _operator, _attribute, _operands, _tensor, _tensor, _shape, _version, _nodes)


# what comes of them -----------------------------------------------------------------------------------


def ran(path: Path, expected: torch.Tensor, folder: Path) -> Outcome:
    """Load a file and call what it holds."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        if path.suffix == ".onnx":
            found = ladder.compile(path)
            seconds = time.process_time() - start
            found = found(*inputs())
        else:
            found = ladder.load(path)
            seconds = time.process_time() - start
            found = found(*inputs())
        found = found[0] if isinstance(found, tuple | list) else found
        kind, text = "same" if alike(found, expected) else "other result", ""
        if kind == "other result" and path.suffix == ".onnx" and len(expected):
            kind, text = by_reference(path, found)
    except ladder.LadderError as error:
        seconds = time.process_time() - start
        kind, text = "error", f"{type(error).__name__}: {error}"
    except BaseException as error:
        seconds = time.process_time() - start
        kind, text = "FAULT", f"{type(error).__name__}: {str(error)[:200]}"
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return Outcome(kind, text, seconds, growth)


def alike(found: Any, expected: Any) -> bool:
    if not isinstance(found, torch.Tensor) or found.shape != expected.shape:
        return False
    return torch.allclose(found.float(), expected.float(), rtol=1e-4, atol=1e-5, equal_nan=True)


def by_reference(path: Path, found: Any) -> tuple[str, str]:
    """Compare with what the altered model computes by the standard's own implementation."""
    model = onnx.load(str(path))
    given = {model.graph.input[0].name: inputs()[0].numpy()}
    try:
        with np.errstate(all="ignore"):
            expected = ReferenceEvaluator(model).run(None, given)[0]
    except Exception as error:
        return "no reference", f"{type(error).__name__}: {error}"
    return ("right", "") if alike(found, torch.from_numpy(np.array(expected))) else ("FAULT", "wrong result")


def worker(pipe: Any, cache: str) -> None:
    """Answer (path, expected result) with what came of it, until the pipe closes."""
    import os

    os.environ["LADDER_CACHE_DIR"] = cache
    torch.set_num_threads(1)
    while True:
        try:
            path, expected = pipe.recv()
        except EOFError:
            return
        pipe.send(ran(path, expected, path.parent))


class Worker:
    """A process that loads files; replaced where it crashes or hangs."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=worker, args=(theirs, str(self.cache)), daemon=True)
        self.process.start()
        theirs.close()

    def run(self, path: Path, expected: torch.Tensor) -> Outcome:
        try:
            self.pipe.send((path, expected))
            if self.pipe.poll(PATIENCE):
                return self.pipe.recv()  # type: ignore[no-any-return]
            outcome = Outcome("FAULT", "hangs", PATIENCE, 0)
        except (EOFError, OSError):
            self.process.join(5)
            outcome = Outcome("FAULT", f"crash, exit status {self.process.exitcode}", 0.0, 0)
        self.stop()
        self.start()
        return outcome

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


def altered(path: Path, draw: random.Random) -> tuple[str, bytes]:
    """Return the name of an alteration and the altered file."""
    if path.suffix == ".onnx":
        if draw.random() < 0.6:
            return "fields", fields_edited(path, draw)
        name = draw.choice(list(BY_BYTES))
        return name, BY_BYTES[name](path.read_bytes(), draw)
    name = draw.choice([*BY_BYTES, *BY_CONTENT, "json", "json", "header"])
    if name in BY_BYTES:
        return name, BY_BYTES[name](path.read_bytes(), draw)
    return name, BY_CONTENT[name](path, draw)


def survey(
    kind: str, count: int, seed: int, folder: Path, seconds: float = SECONDS
) -> tuple[Counter[Any], list[str]]:
    """Alter files of a kind, and return counts of (alteration, outcome) and the faults.

    Parameters
    ----------
    kind
        ``"ladder"`` or ``"onnx"``.
    count, seed
        How many, and which.
    folder
        Receives cache and files.
    seconds
        What one file may take.
    """
    good, bad, cache = folder / "good", folder / "bad", folder / "cache"
    for each in (good, bad, cache):
        each.mkdir(parents=True, exist_ok=True)
    files = exported(good) if kind == "ladder" else onnx_files(good)
    helper_process, draw = Worker(cache), random.Random(seed)
    nothing = torch.zeros(0)
    expected = {}
    for name, path in files.items():
        plain = ladder.compile(path) if kind == "onnx" else ladder.load(path)
        found = plain(*inputs())
        expected[name] = found[0] if isinstance(found, tuple | list) else found
        assert helper_process.run(path, nothing).kind == "other result"  # and warms the worker up
    counts: Counter[Any] = Counter()
    faults = []
    for number in range(count):
        name = draw.choice(list(files))
        how, data = altered(files[name], draw)
        path = bad / f"x{files[name].suffix}"
        path.write_bytes(data)
        outcome = helper_process.run(path, expected[name])
        slow, large = outcome.seconds > seconds, outcome.growth > BYTES
        counts[how, outcome.kind] += 1
        if outcome.kind in ("FAULT", "no reference") or slow or large or list(bad.iterdir()) != [path]:
            kept = folder / f"{kind}-{number}{path.suffix}"
            path.rename(kept)
            faults.append(
                f"{kept}: {how}: {outcome.seconds:.1f} s, {outcome.growth >> 20} MB: {outcome.text}"
            )
    helper_process.stop()
    outside = sorted(
        each.name for each in folder.iterdir() if each.is_dir() and each not in (good, bad, cache)
    )
    return counts, [*faults, *(f"written outside: {name}" for name in outside)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=("ladder", "onnx"), action="append")
    options = parser.parse_args()
    status = 0
    for kind in options.kind or ("ladder", "onnx"):
        folder = Path(tempfile.mkdtemp(prefix="altered-"))  # stays: it holds what made faults
        counts, faults = survey(kind, options.count, options.seed, folder)
        for (how, outcome), times in sorted(counts.items()):
            print(f"{kind:7} {how:9} {outcome:13} {times}")
        print(*faults, f"{kind}: {len(faults)} faults of {options.count}", sep="\n")
        status |= bool(faults)
    return status


if __name__ == "__main__":
    sys.exit(main())
