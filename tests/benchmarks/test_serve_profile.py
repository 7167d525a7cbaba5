"""What `bench serve --profile` reads from a trace: layers, gaps, and the part of a step in which the GPU is busy."""

from __future__ import annotations

import argparse

import pytest
from vllm_ext.benchmarks import serve, serve_profile
from vllm_ext.benchmarks.serve_arms import Serving
from vllm_ext.benchmarks.serve_checkpoints import SHAPES

LAYERS = 3


def trace(experts, *, steps=6, idle=40.0, prompt_gemm="prompt_gemm"):
    """Steps of LAYERS layers, the first of which reads prompts by another product; `experts` is [(name, us, gap)]."""
    kernels, now = [], 0.0

    def add(name, length, gap=0.0):
        nonlocal now
        kernels.append((f"void some::{name}<float, 8>(int)", now + gap, now + gap + length))
        now += gap + length

    for step in range(steps):
        for _ in range(LAYERS):
            add(prompt_gemm if step == 0 else "gemm", 5.0)
            add("attention", 7.0, gap=1.0)
            for name, length, gap in experts:
                add(name, length, gap)
        add("head", 20.0)
        now += idle
    return kernels


def test_layer_lists_kernels_in_order_with_gaps_and_overlaps():
    """A launch that overlaps the one before it has a gap below 0, and is not counted twice as busy."""
    found = serve_profile.profile(trace([("align", 3.0, 0.5), ("stream", 10.0, -2.0)]), LAYERS, 6)
    assert [row["kernel"] for row in found["layer"]] == ["attention", "align", "stream", "gemm"]
    assert [row["us"] for row in found["layer"]] == pytest.approx([7.0, 3.0, 10.0, 5.0])
    assert found["layer"][0]["gap_us"] is None
    assert [row["gap_us"] for row in found["layer"][1:]] == pytest.approx([0.5, -2.0, 0.0])
    layer = 5 + 1 + 7 + 0.5 + 3 - 2 + 10
    assert found["step_us"] == pytest.approx(LAYERS * layer + 20 + 40)
    assert found["busy_us"] == pytest.approx(LAYERS * (layer - 1.5) + 20)
    assert found["kernels"]["gemm"] == [LAYERS * 5, pytest.approx(LAYERS * 5 * 5.0)]


def test_prompts_are_read_by_kernels_of_their_own_and_decoding_is_what_is_shown():
    """The first step's layers are another sequence; the later half's commonest is the answer."""
    found = serve_profile.profile(trace([("align", 3.0, 0.0)]), LAYERS, 6)
    assert "prompt_gemm" in found["kernels"]
    assert "prompt_gemm" not in [row["kernel"] for row in found["layer"]]


def test_arms_own_kernels_are_those_that_another_arm_does_not_run():
    ours = serve_profile.profile(trace([("align", 3.0, 0.0), ("stream", 10.0, 0.0), ("down", 9.0, -4.0)]), LAYERS, 6)
    peer = serve_profile.profile(trace([("sort", 4.0, 0.0), ("Marlin", 12.0, 0.0), ("sum", 2.0, 0.0)]), LAYERS, 6)
    cell = {"ours": ours, "peer": peer}
    serve_profile.mark_own(cell)
    assert [row["kernel"] for row in ours["layer"] if row["own"]] == ["align", "stream", "down"]
    assert (ours["own_us"], peer["own_us"]) == (pytest.approx(18.0), pytest.approx(18.0))
    assert ours["layer_us"] - ours["own_us"] == pytest.approx(peer["layer_us"] - peer["own_us"])


def test_table_compares_by_the_time_the_gpu_is_busy():
    """Where the host bounds a step, rates of all arms are alike, and say nothing of the kernels."""
    slow = serve_profile.profile(trace([("fused_moe_kernel", 29.0, 0.0)], idle=0.0), LAYERS, 6)
    fast = serve_profile.profile(trace([("stream", 4.0, 0.0)], idle=75.0), LAYERS, 6)
    cell = {"BF16": slow, "w4a16-grouped": fast}
    serve_profile.mark_own(cell)
    row = {"cell": "batch 8", "batch": 8, "inputs": 128, "outputs": 128, "tokens_per_second": 8e4}
    text = serve_profile.table({"profile": {"batch 8": cell}, "rows": [{**row, "arm": "BF16"}]})
    # Busy: three layers of 12 us beside the experts, and the head's 20.
    assert text.splitlines()[2] == "| batch 8 | BF16 | 100 | 143 | 41 | 29 | 1.00x |"
    assert text.splitlines()[3] == f"| batch 8 | w4a16-grouped |  | 68 | 16 | 4 | {143 / 68:.2f}x |"


def test_chart_shows_cells_in_the_order_of_the_rates(tmp_path):
    """Long prompts are traced before larger batches, and drawn after them."""
    cell = {"BF16": serve_profile.profile(trace([("fused_moe_kernel", 29.0, 0.0)]), LAYERS, 6)}
    serve_profile.mark_own(cell)
    row = {"batch": 8, "inputs": 128, "outputs": 128, "tokens_per_second": 8e4, "arm": "BF16"}
    rows = [{**row, "cell": name} for name in ("batch 1", "batch 8", "prefill 8192")]
    options = {"shape": "tiny", "layers": LAYERS}
    traced = dict.fromkeys(("batch 1", "prefill 8192", "batch 8"), cell)
    document = {"rows": rows, "options": options, "profile": traced}
    assert list(serve_profile.in_order(document)) == ["batch 1", "batch 8", "prefill 8192"]
    serve_profile.chart(document, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 10_000


@pytest.mark.parametrize(("outputs", "expected"), [(128, 8 / 2000), (1, 8192 / 2000)])
def test_a_step_is_the_batchs_tokens_or_one_long_prompt(outputs, expected):
    row = {"batch": 8, "inputs": 8192, "outputs": outputs, "tokens_per_second": 2000.0}
    assert serve_profile.step_by_rate(row) == pytest.approx(1e6 * expected)


def test_trace_in_which_nothing_runs_once_a_layer_lists_the_kernels_alone():
    found = serve_profile.profile([("head", 0.0, 1.0)], LAYERS, 6)
    assert found == {"kernels": {"head": [1, 1.0]}}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("void vllm::moe::topkGating<8, 128, 4>(float const*, bool)", "topkGating"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<flash::X>>(flash::X::Params)", "FlashAttnFwdSm90"),
        ("stream_kernel", "stream_kernel"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "nvjet_tst_64x8_64x16_4x1_v_bz_TNT"),
        ("Memcpy DtoH (Device -> Pinned)", "Memcpy DtoH"),
    ],
)
def test_short_names(name, expected):
    assert serve_profile.short(name) == expected


class Engine:
    """Answers at a rate of its own, and traces."""

    def __init__(self, rate):
        self.rate, self.asked = rate, []

    def ask(self, op, timeout, **request):
        self.asked.append((op, request["batch"]))
        if op == "trace":
            return {"kernels": [list(kernel) for kernel in trace([("align", 3.0, 0.0)], steps=request["outputs"])]}
        tokens = request["batch"] * request["outputs"]
        return {"seconds": tokens / self.rate, "tokens": tokens, "distinct": 1.0}


def arguments(**changed):
    given = {"batches": [1, 64], "input_tokens": 8, "output_tokens": 8, "prefill": 0, "prompts": []}
    given |= {"layers": LAYERS, "rounds": 2}
    return argparse.Namespace(**{**given, "repeats": 3, "arms": ["BF16", "w4a16-grouped"], **changed})


def serving(tmp_path):
    document = {"options": {"shape": "tiny"}, "orders": [], "rows": [], "failed": {}}
    engines = {"BF16": Engine(100.0), "w4a16-grouped": Engine(150.0)}
    return Serving(SHAPES["tiny"], tmp_path / "out.json", document, engines)


def test_quick_cells_come_several_times_a_round_in_alternating_orders(tmp_path):
    """A batch of one takes 0.2 s of a round of 10 s, and scatters most; so do short prompts."""
    made = serving(tmp_path)
    for number in range(2):
        serve.time_arms(made, number, arguments(prompts=[16], prefill=32))
    samples = {(row["cell"], row["arm"]): row["samples"] for row in made.document["rows"]}
    assert {key: len(value) for key, value in samples.items()} == {
        ("batch 1", "BF16"): 6,
        ("batch 1", "w4a16-grouped"): 6,
        ("batch 64", "BF16"): 2,
        ("batch 64", "w4a16-grouped"): 2,
        ("prompt of 16", "BF16"): 6,
        ("prompt of 16", "w4a16-grouped"): 6,
        ("4 prompts of 16", "BF16"): 6,
        ("4 prompts of 16", "w4a16-grouped"): 6,
        ("prefill 32", "BF16"): 2,
        ("prefill 32", "w4a16-grouped"): 2,
    }
    firsts = [order[0] for order in made.document["orders"]]
    assert firsts == ["BF16", "w4a16-grouped", "BF16", "w4a16-grouped", "BF16", "w4a16-grouped"]


def test_traces_are_kept_by_cell_and_arm(tmp_path):
    made = serving(tmp_path)
    serve.trace_arms(made, arguments(), deadline=float("inf"))
    assert list(made.document["profile"]) == ["batch 1", "batch 64"]
    assert made.document["profile"]["batch 1"]["BF16"]["own_us"] == 0.0
    assert made.engines["BF16"].asked == [("trace", 1), ("trace", 64)]


def test_traces_end_at_their_deadline(tmp_path):
    made = serving(tmp_path)
    serve.trace_arms(made, arguments(), deadline=0.0)
    assert "profile" not in made.document
