"""Alterations of exported files and of ONNX models, drawn at random."""

from __future__ import annotations

import json
import random
import struct
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx
from onnx import helper

from ladder.runtime import archive


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
    manifest, members = archive.read(path)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        target = Path(folder) / "x"
        with zipfile.ZipFile(target, "w", draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as other:
            names = ["manifest.json", *members, draw.choice(["../x.so", "manifest.json", *members])]
            for name in names:
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
        node.input.append(draw.choice(("x", "", *(name for other in graph.node for name in other.output))))


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
