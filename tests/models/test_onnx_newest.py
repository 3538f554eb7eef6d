"""Operators that onnxruntime has had since its version 1.32, beside their definitions, written one by one."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from onnx import parser

import ladder
from ladder.runtime.onnx_ops.operation import Operation
from ladder.runtime.onnx_ops.table import TABLE
from tile_types.errors import ShapeError


def run(name: str, given: dict[str, Any], *operands: Any, count: int = 1) -> Any:
    return TABLE[f"com.microsoft::{name}"](Operation(f"com.microsoft::{name}", 1, given, count), *operands)


def floats(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def whole(shape: tuple[int, ...], low: int, high: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


# attention -----------------------------------------------------------------------------------------------

HEADS, KEPT, SIZE, ROWS, BEFORE = 4, 2, 16, 3, 5


def attended(q: Any, k: Any, v: Any, seen: Any) -> tuple[Any, Any, Any]:
    """Attend row by row in float64, to keys that ``seen`` names; also return scores and shares."""
    found = torch.zeros(len(q), HEADS, SIZE, dtype=torch.float64)
    scores = torch.zeros(HEADS, len(q), len(k), dtype=torch.float64)
    shares = scores.clone()
    for row, head in product(range(len(q)), range(HEADS)):
        at = seen(row)
        scores[head, row, at] = k[at, head // 2].double() @ q[row, head].double() / SIZE**0.5
        shares[head, row, at] = torch.softmax(scores[head, row, at], 0)
        found[row, head] = shares[head, row, at] @ v[at, head // 2].double()
    return found.flatten(1), scores, shares


def operands(count: int = ROWS) -> list[Any]:
    q, k, v = (floats(1, count, heads * SIZE, seed=heads) for heads in (HEADS, KEPT, KEPT + 1))
    past = [floats(1, KEPT, BEFORE, SIZE, seed=seed) for seed in (1, 2)]
    return [
        q,
        k,
        v[..., : KEPT * SIZE],
        *past,
        torch.tensor([BEFORE + count - 1]),
        torch.tensor(BEFORE + count),
    ]


def rows_of(past: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return torch.cat([past[0].transpose(0, 1), new[0].unflatten(-1, (KEPT, SIZE))])


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("asked", [0, 1, 2])
def test_groups_see_all_keys_or_earlier_ones_and_show_their_scores(causal: int, asked: int) -> None:
    q, k, v, past_k, past_v, *_ = given = operands()
    options = {"num_heads": HEADS, "kv_num_heads": KEPT, "causal": causal, "qk_output": asked}
    found, keys, _, scores = run("GroupQueryAttention", options, *given, count=4)
    limit = (lambda row: slice(BEFORE + row + 1)) if causal else (lambda row: slice(None))
    wanted = attended(q[0].unflatten(-1, (HEADS, SIZE)), rows_of(past_k, k), rows_of(past_v, v), limit)
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(keys[0].transpose(0, 1), rows_of(past_k, k))
    assert (scores is None) == (not asked)
    if asked:
        torch.testing.assert_close(scores[0].double(), wanted[asked], rtol=1e-5, atol=1e-5)


def test_rows_that_are_not_filled_change_nothing() -> None:
    """Of three rows two are filled: these are what they would be alone."""
    q, k, v, past_k, past_v, *_ = operands()
    room = [torch.cat([past, torch.zeros(1, KEPT, 4, SIZE)], 2) for past in (past_k, past_v)]
    options, last = {"num_heads": HEADS, "kv_num_heads": KEPT}, torch.tensor([BEFORE + 1])
    short = run("GroupQueryAttention", options, *(x[:, :2] for x in (q, k, v)), *room, last, last + 1)
    found = run(
        "GroupQueryAttention", options, q, k, v, *room, last, torch.tensor(9), *[None] * 9, last - BEFORE + 1
    )
    torch.testing.assert_close(found[0][:, :2], short[0])
    for cache, alone in zip(found[1:3], short[1:3], strict=True):
        assert torch.equal(cache[:, :, : BEFORE + 2], alone[:, :, : BEFORE + 2])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", ["PER_TENSOR", "PER_CHANNEL"])
def test_caches_of_codes(bits: int, kind: str) -> None:
    """New rows are rounded to codes, and attention reads what codes stand for; halves of bytes are biased."""
    q, k, v, *_ = operands()
    most = 1 << bits - 1
    codes = [whole((1, KEPT, BEFORE, SIZE), -most, most, seed) for seed in (3, 4)]
    scale = (
        torch.full((1,), 2.0 / most)
        if kind == "PER_TENSOR"
        else floats(KEPT * SIZE).abs() / most + 0.1 / most
    )
    wide = scale.expand(KEPT * SIZE).reshape(KEPT, SIZE)
    new = [(x[0].unflatten(-1, (KEPT, SIZE)) / wide).round().clamp(-most, most - 1) for x in (k, v)]
    both = [torch.cat([old[0].transpose(0, 1), fresh]).int() for old, fresh in zip(codes, new, strict=True)]

    def stored(rows: torch.Tensor) -> torch.Tensor:
        if bits == 8:
            return rows.to(torch.int8)
        return ((rows[..., ::2] + 8) | (rows[..., 1::2] + 8) << 4).to(torch.uint8)

    options = {"k_quant_type": kind, "v_quant_type": kind, "kv_cache_bit_width": bits}
    options |= {"num_heads": HEADS, "kv_num_heads": KEPT}
    ends = torch.tensor([BEFORE + ROWS - 1]), torch.tensor(BEFORE + ROWS)
    found = run(
        "GroupQueryAttention", options, q, k, v, *map(stored, codes), *ends, *[None] * 5, scale, scale
    )
    values = [rows * wide for rows in both]
    wanted = attended(q[0].unflatten(-1, (HEADS, SIZE)), *values, lambda row: slice(BEFORE + row + 1))[0]
    torch.testing.assert_close(found[0][0].double(), wanted, rtol=1e-4, atol=1e-4)
    for cache, rows in zip(found[1:3], both, strict=True):
        assert torch.equal(cache[0].transpose(0, 1), stored(rows))
    with pytest.raises(ShapeError, match="codes of 8 bits in"):
        run(
            "GroupQueryAttention",
            {**options, "kv_cache_bit_width": 8},
            *operands(),
            *[None] * 5,
            scale,
            scale,
        )


def test_heads_are_normed_before_they_are_rotated() -> None:
    q, k, v, *past = operands()
    scales = [floats(SIZE, seed=seed) for seed in (1, 2)]
    options = {"num_heads": HEADS, "kv_num_heads": KEPT, "qk_norm_epsilon": 0.1, "do_rotary": 1}
    angles = [floats(16, SIZE // 2, seed=seed) for seed in (3, 4)]
    found = run("GroupQueryAttention", options, q, k, v, *past, *angles, *[None] * 5, *scales)
    for x, scale in ((q, scales[0]), (k, scales[1])):
        heads = x.view(*x.shape[:2], -1, SIZE)
        heads /= (heads.square().mean(-1, keepdim=True) + 0.1).sqrt()
        heads *= scale
    for got, wanted in zip(found, run("GroupQueryAttention", options, q, k, v, *past, *angles), strict=True):
        assert got is wanted is None or torch.allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("layout", "axes"), [(0, [0, 0, 0, 0, 1, 1, 2, 2]), (1, [0, 1, 2, 0, 1, 2, 0, 0])])
def test_angles_of_time_row_and_column(layout: int, axes: list[int]) -> None:
    x, tables = floats(2, 3, 2 * 16), [floats(9, 8, seed=seed) for seed in (1, 2)]
    positions = whole((3, 2, 3), 0, 9)
    given = {"mrope_section": [4, 2, 2], "mrope_layout": layout, "num_heads": 2}
    found = run("MRotaryEmbedding", given, x, positions, *tables)
    wanted = torch.empty_like(x).view(2, 3, 2, 16)
    heads = x.view(2, 3, 2, 16)
    for b, row, at in product(range(2), range(3), range(8)):
        cosine, sine = (table[positions[axes[at], b, row], at] for table in tables)
        first, second = heads[b, row, :, at], heads[b, row, :, at + 8]
        wanted[b, row, :, at] = first * cosine - second * sine
        wanted[b, row, :, at + 8] = second * cosine + first * sine
    torch.testing.assert_close(found, wanted.flatten(2))


@pytest.mark.parametrize("beams", [1, 2])
def test_rows_of_other_beams(beams: int) -> None:
    """Kept rows are read from the beams that they come from, and stay where they are; scores are shown."""
    filled, room, batch = 3, 5, 4
    q, k, v = (floats(batch, 1, 8, seed=seed) for seed in range(3))
    past = [floats(batch, 2, room, 4, seed=seed) for seed in (3, 4)]
    origins = whole((batch // beams, beams, room), 0, beams)
    given, length = {"num_heads": 2}, torch.tensor([filled])
    args = [None, None, *past, length, torch.tensor([beams]), origins]
    found = run("DecoderMaskedMultiHeadAttention", {**given, "output_qk": 1}, q, k, v, *args, count=4)
    for row in range(batch):
        source = [row // beams * beams + int(origins[row // beams, row % beams, at]) for at in range(filled)]
        keys, values = (
            torch.cat(
                [torch.stack([old[s, :, at] for at, s in enumerate(source)], 1), new[row].view(2, 1, 4)], 1
            )
            for old, new in zip(past, (k, v), strict=True)
        )
        scores = keys @ q[row].view(2, 4, 1) / 2
        torch.testing.assert_close(found[3][row], scores.mT)
        wanted = torch.softmax(scores.mT, -1) @ values
        torch.testing.assert_close(found[0][row], wanted.view(1, 8))
    for cache, old, new in zip(found[1:3], past, (k, v), strict=True):
        assert torch.equal(cache[:, :, [0, 1, 2, 4]], old[:, :, [0, 1, 2, 4]])
        assert torch.equal(cache[:, :, filled], new.view(batch, 2, 4))


# states --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
def test_a_state_for_each_sequence_of_tokens(rule: str) -> None:
    """Two sequences, one behind another; operands may be one, and gates and rates raw."""
    starts, state = torch.tensor([0, 2, 5]), floats(2, 4, 6, 8)
    q, k, v = (
        floats(5, heads, size, seed=seed) for seed, (heads, size) in enumerate(((2, 8), (2, 8), (4, 6)))
    )
    raw, beta, a_log, bias = floats(5, 4), floats(5, 4, seed=9), floats(4, seed=1), floats(4, seed=2)
    given = {
        "update_rule": rule,
        "gate_activation": "softplus",
        "beta_activation": "sigmoid",
        "qk_l2_norm": 1,
    }
    packed = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], 1)
    found = run("GatedDeltaNet", given, packed, None, None, starts, raw, beta, state, a_log, bias)
    same = run("GatedDeltaNet", given, q, k, v, starts, raw, beta, state, a_log, bias)
    assert all(torch.equal(*pair) for pair in zip(found, same, strict=True))
    wanted, kept = torch.empty(5, 4, 6), state.clone()
    for at, head in product(range(5), range(4)):
        each = 0 if at < 2 else 1
        key, query = (x[at, head // 2] / x[at, head // 2].norm() for x in (k, q))
        if "gated" in rule:
            kept[each, head] *= torch.exp(
                -torch.exp(a_log[head]) * torch.log1p((raw[at, head] + bias[head]).exp())
            )
        value = v[at, head]
        if "delta" in rule:
            value = torch.sigmoid(beta[at, head]) * (value - kept[each, head] @ key)
        kept[each, head] += torch.outer(value, key)
        wanted[at, head] = kept[each, head] @ query / 8**0.5
    torch.testing.assert_close(found[0], wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1], kept, rtol=1e-4, atol=1e-5)
    with pytest.raises(ShapeError, match="sequences that start at"):
        run("GatedDeltaNet", given, q, k, v, torch.tensor([0, 4, 9]), raw, beta, state, a_log, bias)


def test_convolutions_of_sequences_that_lie_one_behind_another() -> None:
    x, weight, state = floats(5, 3), floats(3, 1, 3), floats(2, 3, 4)
    given = {"dilation": 2, "activation": "silu"}
    found, kept = run("VarlenCausalConvWithState", given, x, weight, torch.tensor([0, 2, 5]), None, state)
    for each, part in enumerate((slice(0, 2), slice(2, 5))):
        alone = run("CausalConvWithState", given, x[part].T[None], weight, None, state[each : each + 1])
        torch.testing.assert_close(found[part].T[None], alone[0])
        assert torch.equal(kept[each : each + 1], alone[1])


def test_convolutions_whose_channels_come_last() -> None:
    x, weight, state = floats(2, 5, 2, 3), floats(6, 1, 4), floats(2, 3, 2, 3)
    found = run("CausalConvWithState", {"channels_last": 1}, x, weight, None, state)
    first = run("CausalConvWithState", {}, x.flatten(2).mT, weight, None, state.flatten(2).mT)
    for got, wanted in zip(found, first, strict=True):
        assert torch.equal(got.flatten(2), wanted.mT)


# streams and experts -------------------------------------------------------------------------------------


def test_streams_are_mixed() -> None:
    streams, block, mix = floats(2, 3, 4, 8), floats(2, 3, 8), floats(2, 3, 4, 4)
    for gates in (floats(2, 3, 4), floats(2, 3, 4, 1), floats(2, 3, 4, 8)):
        wide = gates.reshape(2, 3, 4, -1)
        before = 0.5 * torch.einsum("abch,abch->abh", streams, wide.expand_as(streams))
        for flat in (0, 4):
            given, x = {"num_branches": flat}, streams.flatten(2) if flat else streams
            found = run("HyperConnectionPreMix", {**given, "reduction_scale": 0.5}, x, gates)
            torch.testing.assert_close(found, before)
            after = torch.einsum("abck,abch->abkh", mix, streams) + wide * block.unsqueeze(2)
            found = run("HyperConnectionPostMix", given, x, block, gates, mix)
            torch.testing.assert_close(found, after.reshape(x.shape))


def test_streams_in_a_plan() -> None:
    """Their shapes are known at import: the model is one plan for any number of rows."""
    text = "g (float[b, 32] x, float[b, 4] p) => (float[b, 8] y) {\n"
    text += "m = com.microsoft.HyperConnectionPreMix <num_branches: int = 4> (x, p)\ny = Relu (m) }"
    model = parser.parse_model(f'<ir_version: 9, opset_import: ["" : 17, "com.microsoft" : 1]> {text}')
    fast = ladder.compile(model)
    for rows in (3, 5):
        x, p = floats(rows, 32), floats(rows, 4)
        wanted = torch.einsum("rch,rc->rh", x.view(rows, 4, 8), p).relu()
        torch.testing.assert_close(fast(x, p), wanted, rtol=1e-5, atol=1e-5)
    assert len(fast.staged.stages) == 1


def test_gates_of_engrams() -> None:
    key, query, value = floats(2, 3, 4, 8), floats(2, 3, 4, 8, seed=1), floats(2, 3, 8)
    scales = [floats(4, 8, seed=seed) for seed in (2, 3, 4)]

    def normed(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale

    dot = (normed(key, scales[0]) * normed(query, scales[1])).sum(-1, keepdim=True) / 8**0.5
    wanted = torch.sigmoid(dot.sign() * dot.abs().clamp(min=1e-6).sqrt()) * value.unsqueeze(2)
    found = run("EngramGate", {}, key, query, value, *scales, count=2)
    torch.testing.assert_close(found[0], wanted)
    torch.testing.assert_close(found[1], normed(wanted, scales[2]))


def test_experts_are_chosen_by_groups() -> None:
    logits, bias = floats(5, 12), floats(12) / 4
    given = {"top_k": 3, "n_group": 4, "topk_group": 2, "group_topk": 2, "router_sentinel": -7.0}
    found, scores = run("MoEGroupRouter", given, logits, bias), torch.sigmoid(logits)
    for row, score in enumerate(scores):
        biased = (score + bias).view(4, 3)
        groups = biased.sort(1, descending=True).values[:, :2].sum(1).argsort(descending=True)[:2].tolist()
        allowed = [expert for expert in range(12) if expert // 3 in groups]
        chosen = sorted(allowed, key=lambda expert: -float((score + bias)[expert]))[:3]
        wanted = torch.full((12,), -7.0)
        wanted[chosen] = score[chosen].log()
        torch.testing.assert_close(found[row], wanted)
    assert torch.equal(run("MoEGroupRouter", {"top_k": 1}, logits, bias, count=3)[1], scores + bias)


@pytest.mark.parametrize("normalized", [0, 1])
def test_shares_of_stored_experts(normalized: int) -> None:
    """Given ones are taken as the node says; those of the router are normalized always, as by onnxruntime."""
    x, router, weights = floats(5, 16), floats(5, 4), floats(5, 4, seed=3).abs()
    codes, scales = whole((2, 4, 16, 16), 0, 256).to(torch.uint8), torch.full((4, 16), 0.01)
    given = {
        "k": 2,
        "activation_type": "identity",
        "expert_weight_bits": 8,
        "normalize_routing_weights": normalized,
    }
    first, second = ((part.float() - 128) * 0.01 for part in codes)
    each = torch.einsum("rh,eih,eoi->reo", x, first, second)
    chosen = torch.zeros(5, 4).scatter(1, router.topk(2).indices, 1.0)
    for stated, shares in ((None, router.exp() * chosen), (weights, weights * chosen)):
        if normalized or stated is None:
            shares = shares / shares.sum(1, keepdim=True)
        args = [codes[0], scales, None, codes[1], scales, *[None] * 7, stated]
        found = run("QMoE", given, x, router, *args)
        torch.testing.assert_close(found, torch.einsum("re,reo->ro", shares, each), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [0, 3, 9])
def test_codes_that_would_cross_bytes_are_named(bits: int) -> None:
    codes, scales = torch.zeros(4, 2, max(4 * bits, 1), dtype=torch.uint8), torch.ones(4, 2)
    given = {"K": 64, "N": 4, "bits": bits, "block_size": 32}
    with pytest.raises(ShapeError, match=f"codes of {bits} bits are not supported"):
        run("MatMulNBits", given, floats(2, 64), codes, scales)


# tokens --------------------------------------------------------------------------------------------------


def test_no_gram_is_repeated() -> None:
    found = run("NGramRepeatBlock", {"ngram_size": 3}, torch.tensor([[1, 2, 3, 1, 2]]), torch.zeros(1, 5))
    assert found.tolist() == [[0, 0, 0, float("-inf"), 0]]


@pytest.mark.parametrize("end", [None, 0])
@pytest.mark.parametrize("parts", [False, True])
def test_hashes_of_grams(end: int | None, parts: bool) -> None:
    """Beside the definition token by token; a sequence in two calls gives the same."""
    ids, factors, sizes = whole((2, 7), 0, 4), torch.tensor([5, 7, 11]), torch.tensor([97, 89, 83, 79])
    given = {"pad_id": 3, "max_ngram_size": 3, "n_head_per_ngram": 2, "reset_on_eos": 1}
    stop, segments = None if end is None else torch.tensor(end), torch.tensor([[0, 0, 1, 1, 1, 2, 2]] * 2)
    args = [None, stop, segments if parts else None]
    found, kept = run("NGramHashMapping", given, ids, factors, sizes, None, *args)
    for row, at in product(range(2), range(7)):
        mixed = int(ids[row, at] * factors[0])
        for back in (1, 2):
            between = range(at - back, at)
            known = at - back >= 0 and not (parts and segments[0, at - back] != segments[0, at])
            known = known and not (end is not None and any(ids[row, place] == end for place in between))
            token = int(ids[row, at - back]) if known else 3 if end is None else end
            mixed ^= token * int(factors[back])
            wanted = [mixed % int(size) for size in sizes[2 * back - 2 : 2 * back]]
            assert found[row, at, 2 * back - 2 : 2 * back].tolist() == wanted
    assert torch.equal(kept, ids[:, 5:])
    if not parts:
        first, past = run("NGramHashMapping", given, ids[:, :3], factors, sizes, None, *args)
        second = run("NGramHashMapping", given, ids[:, 3:], factors, sizes, past, *args)[0]
        assert torch.equal(torch.cat([first, second], 1), found)


@pytest.mark.parametrize(
    ("texts", "given", "wanted"),
    [
        (["ab cd", "e  f g "], {"separators": [" "]}, [["ab", "cd", "#"], ["e", "f", "g"]]),
        (["aabbaab"], {"separators": ["ab", "b"]}, [["a", "a"]]),
        (["a1b22c"], {"separators": ["[0-9]+"]}, [["a", "b", "c"]]),
        (["ü b"], {"separators": [""]}, [["ü", " ", "b"]]),
        (["", "a"], {"separators": [" "], "mark": 1}, [["\x02", "\x03", "#"], ["\x02", "a", "\x03"]]),
        (["a bb", "ccc"], {"tokenexp": "[a-z]+", "mincharnum": 2}, [["bb"], ["ccc"]]),
        (["", ""], {"separators": [" "], "mark": 1}, [[], []]),
        ([["a b"], ["c"]], {"separators": [r"\s"]}, [[["a", "b"]], [["c", "#"]]]),
        (["ab, c!!"], {"tokenexp": r"\w+|[^\w\s]+"}, [["ab", ",", "c", "!!"]]),
        (["abc ab"], {"tokenexp": "a|ab|b?"}, [["ab", "ab"]]),
        (["ab a-b"], {"tokenexp": r"\b\w{2,}\b|-"}, [["ab", "-"]]),
        (["a1b, c"], {"separators": [r",\s|\d", "b"]}, [["a", "c"]]),
    ],
)
def test_tokens(texts: list[Any], given: dict[str, Any], wanted: list[Any]) -> None:
    """What onnxruntime 1.32 returns."""
    found = run("Tokenizer", {"pad_value": "#", "mincharnum": 1, **given}, np.array(texts, dtype=object))
    assert found.tolist() == wanted


@pytest.mark.parametrize(
    "pattern", ["(a+)+", "a|(b)", "a*a*", "a{2}b", "^a", "a??", "\\p{L}", "[a", "b*", r"\b,?", "a|b*", "a|"]
)
def test_patterns_that_may_match_otherwise_are_named(pattern: str) -> None:
    """RE2 takes the longest match in time that grows with the text alone."""
    with pytest.raises(ShapeError, match="Tokenizer with"):
        run("Tokenizer", {"separators": [pattern]}, np.array(["aaaaaaaaab"], dtype=object))


def test_hashes_of_texts_are_murmurs() -> None:
    """Values that its author's program gives."""
    texts = np.array(
        ["", "hello", "hello, world", "The quick brown fox jumps over the lazy dog"], dtype=object
    )
    wanted = [0, 0x248BFA47, 0x149BBB7F, 0x2E4FF723]
    found = run("MurmurHash3", {}, texts)
    assert found.dtype == torch.uint32
    assert found.tolist() == wanted
    word = torch.frombuffer(bytearray(b"hell"), dtype=torch.int32)
    same = run("MurmurHash3", {"positive": 0}, np.array([b"hell"], dtype=object))
    assert torch.equal(run("MurmurHash3", {"positive": 0}, word), same)


@pytest.mark.parametrize("shape", [(1, 4), (3, 1), (3, 4)])
def test_the_cheapest_way(shape: tuple[int, int]) -> None:
    costs = floats(*shape)

    def cheapest(row: int, column: int) -> tuple[float, list[list[int]]]:
        """By trying all ways."""
        if (row, column) == (0, 0):
            return float(costs[0, 0]), [[0, 0]]
        before = [(row - 1, column - 1), (row - 1, column), (row, column - 1)]
        least, way = min(cheapest(*at) for at in before if min(at) >= 0)
        return least + float(costs[row, column]), [*way, [row, column]]

    wanted = cheapest(shape[0] - 1, shape[1] - 1)[1]
    assert run("DynamicTimeWarping", {}, costs).T.tolist() == wanted


# pictures ------------------------------------------------------------------------------------------------


def test_crops_of_pictures() -> None:
    """A whole picture is resized with aligned corners; what lies outside is a number."""
    x, which = floats(2, 3, 5, 7), torch.tensor([1, 0])
    boxes = torch.tensor([[0.0, 0, 1, 1], [-1, -1, 1, 1]])
    found = run("CropAndResize", {"extrapolation_value": 9.0}, x, boxes, which, torch.tensor([9, 4]))
    wanted = torch.nn.functional.interpolate(x[1:], (9, 4), mode="bilinear", align_corners=True)
    torch.testing.assert_close(found[:1], wanted)
    assert (found[1, :, :4] == 9).all()
    assert (found[1, :, 4:, 2:] != 9).all()
    exact = run("CropAndResize", {"mode": "nearest"}, x, boxes[:1], which[:1], torch.tensor([5, 7]))
    assert torch.equal(exact, x[1:])
    with pytest.raises(ShapeError, match="crops of 0 x 4"):
        run("CropAndResize", {}, x, boxes, which, torch.tensor([0, 4]))
