"""Printed graphs, as files to read and to compare with."""

from __future__ import annotations

import pytest
from ir_examples import of_matmul_blocks, of_softmax_blocks

from ladder.ir import Gemm, gemm_graph, parse, verify

GRAPHS = {
    "gemm_nf4.txt": gemm_graph(Gemm(4096, 4096, "nf4", group_size=64)),
    "gemm_uint4_int8_bias_silu.txt": gemm_graph(
        Gemm(
            4096,
            4096,
            "uint4",
            "int8",
            group_size=4096,
            scale=False,
            zero="integer",
            token_scale=True,
            bias=True,
            epilogue=("silu",),
        )
    ),
    "matmul_blocks.txt": of_matmul_blocks("M", 4096, 4096),
    "online_softmax_blocks.txt": of_softmax_blocks(),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_text(name, golden):
    verify(GRAPHS[name])
    golden(f"ir_{name}", f"{GRAPHS[name]}\n")


@pytest.mark.parametrize("name", GRAPHS)
def test_text_reads_back(name):
    assert parse(str(GRAPHS[name])) == GRAPHS[name]
