"""How fast models of other tools' checkpoints are loaded from the page cache, and with how much memory.

``python -m benchmarks.model_loading [--layers 4] [--threads 2] [--device cuda] [--vocabulary 128256]``
writes models of layers of Llama-3.1-8B's shapes with random bits in each format, loads them by
`load_pretrained`, each in a process of its own that has the kernels in its cache, and prints GB of the file
per second of wall time and of processor time, and the largest memory above that before. Mapped pages of the
file count. ``ladder`` is what `ladder convert` makes of the model in compressed-tensors' form.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.checkpoints import CONFIGS, SHAPES, gguf_blocks, peak_memory
from benchmarks.harness import write_record

GGUF = {"gguf q4_k": "Q4_K", "gguf q6_k": "Q6_K", "gguf iq4_xs": "IQ4_XS"}
"""Format -> gguf's name of its type."""

OWN, SOURCE = "ladder", "pack-quantized"
"""Our own format, and the one that it is converted from."""

VOCABULARY = 1024
BLOCK = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Names of a block's layers in transformers -> in GGUF."""

SIZES: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def write_folder(name: str, folder: Path, layers: int, vocabulary: int) -> Path:
    """Write a folder that transformers loads, with random bits, the same in all blocks."""
    make, quantization = CONFIGS[SOURCE if name == OWN else name]
    block = {module: make(*shape) for module, shape in SHAPES.items()}
    arrays = {"model.norm.weight": torch.ones(4096).half()}
    for layer in range(layers):
        start = f"model.layers.{layer}"
        for module, parts in block.items():
            arrays |= {f"{start}.{module}.{part}": value.clone() for part, value in parts.items()}
        for at in ("input", "post_attention"):
            arrays[f"{start}.{at}_layernorm.weight"] = torch.ones(4096).half()
    for table in ("model.embed_tokens", "lm_head"):
        arrays[f"{table}.weight"] = table_of(vocabulary)
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float16"}
    described = {**kind, **SIZES, "vocab_size": vocabulary, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps({**described, "quantization_config": quantization}))
    if name == OWN:
        convert(folder, {**described, "quantization_config": {"quant_method": OWN}})
    return folder


def convert(folder: Path, described: dict[str, Any]) -> None:
    """Write a model in our own storage in place of what a folder holds."""
    from ladder.formats.checkpoint import load_checkpoint
    from ladder.formats.native_write import write

    checkpoint = load_checkpoint(folder)
    write(checkpoint, folder / "own.safetensors", list(checkpoint))
    (folder / "own.safetensors").replace(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(described))


def table_of(vocabulary: int) -> torch.Tensor:
    """Return the rows of a vocabulary."""
    return torch.randn(VOCABULARY, 4096).half().repeat(-(-vocabulary // VOCABULARY), 1)[:vocabulary]


def write_gguf(kind: str, path: Path, layers: int, vocabulary: int) -> Path:
    """Write a GGUF file of a Llama, with `gguf_blocks`."""
    import gguf

    number = gguf.GGMLQuantizationType[kind]
    elements, nbytes = gguf.GGML_QUANT_SIZES[number]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(2048)
    writer.add_embedding_length(4096)
    writer.add_feed_forward_length(14336)
    writer.add_head_count(32)
    writer.add_head_count_kv(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    writer.add_rope_freq_base(10000.0)
    drawn = {module: gguf_blocks(int(number), n * k).numpy() for module, (n, k) in SHAPES.items()}
    for layer in range(layers):
        for module, (n, k) in SHAPES.items():
            octets = drawn[module].reshape(n, k // elements * nbytes)
            writer.add_tensor(f"blk.{layer}.{BLOCK[module]}.weight", octets, raw_dtype=number)
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", torch.ones(4096).numpy())
    writer.add_tensor("output_norm.weight", torch.ones(4096).numpy())
    for table in ("token_embd", "output"):
        writer.add_tensor(f"{table}.weight", table_of(vocabulary).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def measure(path: str, threads: int, device: str) -> dict[str, float]:
    """Load a model twice: the first time shows the memory, imports included, the second how long it takes."""
    from transformers import AutoModelForCausalLM

    from ladder.integrations.transformers import load_pretrained

    torch.set_num_threads(threads)
    if device != "cpu":
        torch.zeros(1, device=device)
    given: dict[str, Any] = {} if device == "cpu" else {"device_map": device}

    def load() -> Any:
        return load_pretrained(AutoModelForCausalLM, path, dtype=torch.float16, **given)

    start = peak_memory()
    load()
    peak = peak_memory()
    gc.collect()
    wall, processor = time.perf_counter(), time.process_time()
    model = load()
    if device != "cpu":
        torch.cuda.synchronize()
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    after = resident()
    with torch.no_grad():
        found = model(torch.arange(4, device=model.device)[None]).logits
    assert found.shape[-1] == model.config.vocab_size
    return {"wall": wall, "processor": processor, "start": start, "peak": peak, "after": after}


def resident() -> float:
    """Return the memory of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def write_model(name: str, folder: Path, layers: int, vocabulary: int) -> Path:
    if name in GGUF:
        return write_gguf(GGUF[name], folder / "model.gguf", layers, vocabulary)
    return write_folder(name, folder, layers, vocabulary)


def run(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one format, each turn in a process of its own; a small model before has the kernels built."""
    found: list[dict[str, float]] = []
    for layers, turns in ((1, 1), (arguments.layers, arguments.turns)):
        vocabulary = arguments.vocabulary if found else VOCABULARY
        with tempfile.TemporaryDirectory() as folder:
            path = write_model(name, Path(folder), layers, vocabulary)
            size = sum(file.stat().st_size for file in Path(folder).iterdir())
            call = f"measure({str(path)!r}, {arguments.threads}, {arguments.device!r})"
            code = f"import json; from benchmarks.model_loading import measure; print(json.dumps({call}))"
            for _ in range(turns):
                done = subprocess.run(
                    [sys.executable, "-c", code], capture_output=True, text=True, check=False
                )
                if done.returncode:
                    raise SystemExit(done.stderr[-3000:])
                found.append(json.loads(done.stdout.splitlines()[-1]))
    return {"format": name, "bytes": size, "turns": found[1:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--formats", default=",".join(["gptq", "awq", SOURCE, "mxfp4", "nf4", OWN, *GGUF]))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows = []
    for name in arguments.formats.split(","):
        row = run(name, arguments)
        size, turns = row["bytes"], row["turns"]
        wall, processor = (min(turn[key] for turn in turns) for key in ("wall", "processor"))
        peak, after = (max(turn[key] - turn["start"] for turn in turns) for key in ("peak", "after"))
        print(
            f"{name:16} {size / 1e6:7.1f} MB  {wall:6.2f} s {size / 1e9 / wall:6.2f} GB/s"
            f"  {size / 1e9 / processor:6.2f} GB per processor second"
            f"  peak +{peak / 1e6:.0f} MB, after +{after / 1e6:.0f} MB",
            flush=True,
        )
        rows.append(row)
    if arguments.output:
        given = {key: getattr(arguments, key) for key in ("layers", "threads", "device", "vocabulary")}
        write_record(arguments.output, {"cores": os.cpu_count(), **given, "rows": rows})


if __name__ == "__main__":
    main()
