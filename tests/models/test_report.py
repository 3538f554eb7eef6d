"""`ladder report`: what it finds out, and a page that needs nothing but itself."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import ladder
from ladder import knobs
from ladder.cli.app import run
from ladder.cli.model_page import page
from ladder.cli.model_report import ModelReport, run_report
from targets import get_device

MODEL = """<ir_version: 10, opset_import: ["" : 18]>
agraph (float[batch, 64] x) => (float[batch, 64] y) {
    a = Exp(x)  s = ReduceMax(a)  b = Div(a, s)  c = Softmax(b)
    p = MatMul(c, w)  q = Relu(p)  y = Add(q, x)
}"""

FUNCTION = """
import torch, ladder
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 96), torch.nn.Linear(96, 64)
    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.up(x))).softmax(-1)
def make():
    torch.manual_seed(0)
    return ladder.quantize(Net(), group_size=32), torch.randn(3, 64)
def no_model():
    return 3
def fails():
    raise ValueError("why")
"""


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    import onnx

    found = tmp_path_factory.mktemp("report")
    model = onnx.parser.parse_model(MODEL)
    model.graph.initializer.append(onnx.numpy_helper.from_array(torch.eye(64).numpy() * 2, "w"))
    onnx.save(model, str(found / "net.onnx"))
    (found / "programs.py").write_text(FUNCTION)
    with knobs.override(cache_dir=found / "cache"):
        yield found


class Page(HTMLParser):
    """Reads a page: tags that do not close, what is loaded from elsewhere, links that lead nowhere."""

    VOID = ("meta", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self.ids |= {given["id"]} if given.get("id") else set()
        self.links |= {given["href"]} if given.get("href") else set()
        assert not {"src", "onclick", "onload"} & set(given)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def checked(report: ModelReport) -> Page:
    """Return a report's page; it is well formed, and complete in itself."""
    found = Page(page(report))
    assert not found.open
    assert not {"script", "link", "img", "iframe"} & set(found.tags)
    assert all(link.startswith("#") and link[1:] in found.ids for link in found.links)
    assert "http" not in page(report)
    assert {f"step-{step.number}" for step in report.steps} <= found.ids
    return found


def test_an_onnx_model_that_runs_here(folder: Path) -> None:
    report = run_report(str(folder / "net.onnx"), sizes={"batch": 5})
    assert report.sizes == {"batch": 5}
    assert report.not_measured == ""
    product = next(step for step in report.steps if step.kind in ("product", "rows"))
    assert product.flops == 2 * 5 * 64 * 64
    assert product.bytes >= 4 * (64 * 64 + 2 * 5 * 64)
    assert product.core == "float32"
    assert all(step.measured_us and step.measured_us > 0 for step in report.steps if not step.constant)
    assert report.call_us
    text = " ".join(checked(report).text)
    assert product.executor in text
    assert product.reason in text  # why a product is no kernel of ours


def test_sizes_that_a_model_needs_are_found(folder: Path) -> None:
    """A window that passes over an open axis wants more than one element of it."""
    import onnx

    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 18]>
    g (float[batch, 3, N] x) => (float[batch, 5, M] y) { y = Conv(x, w) }""")
    weight = torch.randn(5, 3, 40).numpy()
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(model, str(folder / "conv.onnx"))
    assert run_report(str(folder / "conv.onnx")).sizes == {"batch": 1, "N": 64}
    with pytest.raises(
        ladder.LadderError, match=r"none of the sizes tried: give --sizes for \['N', 'batch'\]"
    ):
        run_report(str(folder / "conv.onnx"), sizes={"N": 2})


def test_a_device_that_is_not_here(folder: Path) -> None:
    report = run_report(str(folder / "net.onnx"), "cuda/sm_90a", {"batch": 4096})
    assert "is not here" in report.not_measured
    assert all(step.measured_us is None for step in report.steps)
    product = next(step for step in report.steps if step.kind == "product")
    assert report.peaks.bandwidth == get_device("cuda/sm_90a").layer("dram").bandwidth
    least = max(product.bytes / report.peaks.bandwidth, product.flops / report.peaks.vector)
    assert product.least_us == pytest.approx(least * 1e6)
    assert "Nothing was measured" in " ".join(checked(report).text)


def test_a_function_and_the_file_that_it_exports(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    report = run_report("python:programs:make")
    assert [step.kind for step in report.steps].count("gemm") == 2
    assert any("silu" in step.executor for step in report.steps)
    checked(report)
    import programs

    model, x = programs.make()
    with torch.no_grad():
        ladder.compile(model).export(folder / "net.ladder", x)
    saved = run_report(str(folder / "net.ladder"))
    assert [(s.kind, s.operators, s.bytes) for s in saved.steps] == [
        (s.kind, s.operators, s.bytes) for s in report.steps
    ]
    assert run(["report", "net.ladder", "--target", "cuda/sm_90a"]) == 2


def test_the_command(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert run(["report", "net.onnx"]) == 0
    assert "net.html" in capsys.readouterr().out
    assert (folder / "net.html").read_text().startswith("<!doctype html>")
    assert run(["report", "net.onnx", "--json", "--output", "other.html", "--sizes", "batch=2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sizes"] == {"batch": 2}
    assert found["page"] == "other.html"
    assert {"bytes", "flops", "least_us", "measured_us", "reason"} <= set(found["steps"][0])


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere.onnx"], 2, "is no file"),
        (["programs.py"], 2, "no Ladder artefact"),
        (["python:programs"], 2, "names nothing"),
        (["python:programs:missing"], 2, "cannot be imported"),
        (["python:programs:no_model"], 2, "no callable"),
        (["net.onnx", "--sizes", "length=3"], 2, "no size length"),
        (["net.onnx", "--sizes", "batch"], 2, "NAME=NUMBER"),
        (["net.onnx", "--target", "cuda/sm_91"], 2, "sm_90a"),
        (["net.onnx", "--output", "/proc/none/a.html"], 2, "cannot write"),
        (["net.onnx", "--output", "/dev/full"], 1, "No space left"),
        (["net.onnx", "--sizes", "batch=²"], 2, "NAME=NUMBER"),
        (["net.onnx", "--sizes", "batch=2,batch=3"], 2, "each name once"),
        (["python:programs:fails"], 1, "programs.py:15: ValueError: why [ladder --verbose shows"),
        ([], 2, "Missing argument 'model'"),
    ],
)
def test_requests_that_are_wrong(
    folder: Path, arguments: list[str], code: int, message: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(folder)
    assert run(["report", *arguments]) == code
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_compile_writes_what_load_runs(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert run(["compile", "net.onnx", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["path"] == "net.ladder"
    assert found["bytes"] == (folder / "net.ladder").stat().st_size
    x = torch.randn(2, 64)
    assert torch.equal(ladder.load(folder / "net.ladder")(x), ladder.compile(folder / "net.onnx")(x))
    for arguments, code, message in (
        (["net.ladder"], 2, "is no ONNX model"),
        (["net.onnx", "--target", "cuda/sm_100a"], 1, "is not here"),
        (["net.onnx", "--output", "/proc/none/x.ladder"], 2, "cannot write"),
        (["nowhere.onnx"], 2, "does not exist"),
    ):
        assert run(["compile", *arguments]) == code
        assert message in capsys.readouterr().err


@pytest.mark.skipif(not os.environ.get("LADDER_TEST_BROWSER"), reason="LADDER_TEST_BROWSER names no browser")
def test_a_browser_shows_it(folder: Path) -> None:
    path = folder / "shown.html"
    path.write_text(page(run_report(str(folder / "net.onnx"))))
    shot = folder / "shown.png"
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--screenshot={shot}"]
    subprocess.run(
        [os.environ["LADDER_TEST_BROWSER"], *options, path.as_uri()], check=True, capture_output=True
    )
    assert shot.stat().st_size > 10_000


def test_every_kind_of_part_has_a_place() -> None:
    from ladder.cli.model_page import KINDS
    from ladder.partition.subgraphs import KINDS as EVERY

    assert set(KINDS) == set(EVERY)
    assert KINDS[-1] == "view"


def test_an_onnx_model_that_is_one_plan_for_some_sizes_only(folder: Path) -> None:
    """Windows of 40 elements: 1 and 16 are fewer; what broadcasts is known once sizes are."""
    import onnx
    from onnx import parser

    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        frames (float[1, 1, n] x, float[m] z) => (float[1, 1, p] y)
        <int64[1] zero = {0}, int64[1] all = {9223372036854775807}, int64[1] two = {2}> {
            s = Slice(z, zero, all, zero, two)
            t = MaxPool <kernel_shape = [40]> (x)
            y = Add(t, s)
        }""")
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "p2o.Dynamic.2"
    onnx.save(model, str(folder / "frames.onnx"))
    report = run_report(str(folder / "frames.onnx"), sizes={"m": 2})
    assert report.sizes == {"m": 2, "p2o_Dynamic_2": 64}
    with pytest.raises(ladder.LadderError, match="no single plan"):
        run_report(str(folder / "frames.onnx"), "cuda/sm_90a", {"m": 2})
