"""A process that compiles for AMD GPUs: LLVM ends it where an architecture lacks an instruction.

Run by `ladder.lower.rocm.toolchain` as a script. Requests and answers are lines of JSON on standard
input and output; LLVM and TVM write what they have to say to standard error. Imports nothing of Ladder.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ABI_VERSION_AT = 8


class Linker:
    """Links the object that TVM hands over, and keeps the code object; without a command, the object."""

    def __init__(self) -> None:
        self.command: list[str] = []
        self.abi = 0
        self.linked = b""

    def __call__(self, binary: Any) -> bytes:
        """Answer TVM's request for a code object."""
        marked = bytearray(bytes(binary))
        marked[ABI_VERSION_AT] = self.abi
        self.linked = self.link(bytes(marked)) if self.command else bytes(marked)
        return self.linked

    def link(self, marked: bytes) -> bytes:
        """Return the code object of an object file."""
        with tempfile.TemporaryDirectory(prefix="ladder-rocm-") as folder:
            source, result = Path(folder) / "kernel.o", Path(folder) / "kernel.co"
            source.write_bytes(marked)
            command = [*self.command, "-shared", str(source), "-o", str(result)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{' '.join(self.command)} failed: {done.stderr.strip()}")
            return result.read_bytes()


@functools.cache
def module_of(name: str) -> Any:
    """Load a module of `ladder.lower` from its file: importing Ladder would take longer than compiling."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_module(request: dict[str, Any], linker: Linker) -> dict[str, Any]:
    """Compile one module; write its code object and, where the request names them, assembly and library."""
    import tvm
    from tvm.target import Target

    linker.command, linker.abi, linker.linked = request["linker"], request["abi"], b""
    module = tvm.ir.load_json(Path(request["tir"]).read_text())
    built = tvm.compile(module, target=Target(request["target"]), tir_pipeline=module_of("passes").pipeline())
    Path(request["code_object"]).write_bytes(linker.linked)
    if "library" in request:
        Path(request["assembly"]).write_text(built.mod.imports[0].inspect_source("asm"))
        built.export_library(request["library"], fcompile=module_of("linking").link)
    return {}


def main() -> None:
    """Serve requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing but answers on what was standard output
    sys.modules["torch"] = None  # type: ignore[assignment]  # TVM's libraries import it where they can
    module_of("tvm_import").import_tvm()  # which registers callbacks of its own
    import tvm_ffi

    linker = Linker()
    tvm_ffi.register_global_func("tvm_callback_rocm_link", linker, override=True)
    # Device libraries are not needed: kernels call no mathematical functions that LLVM lacks.
    linked = [str(Path(__file__).with_name("bfloat16.ll"))]
    tvm_ffi.register_global_func("tvm_callback_rocm_bitcode_path", lambda *_: linked, override=True)
    for line in sys.stdin:
        try:
            answer = compile_module(json.loads(line), linker)
        except Exception as error:  # whatever TVM raises is for the other process to show
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
