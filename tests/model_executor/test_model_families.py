"""Every model family through real vLLM with a tiny random checkpoint; see `families`."""

from __future__ import annotations

import json

import families
import pytest

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Checkpoints by family and name."""
    pytest.importorskip("vllm")
    root = tmp_path_factory.mktemp("families")
    return {f.name: families.write_checkpoints(f, root / f.kind) for f in families.FAMILIES}


@pytest.fixture(scope="module")
def answers(run_engines, checkpoints):
    """Answers to `single_jobs` by family, all from one process."""
    jobs = {name: families.single_jobs(paths) for name, paths in checkpoints.items()}
    results = iter(run_engines([job for each in jobs.values() for job in each], timeout=500))
    return {name: [next(results) for _ in each] for name, each in jobs.items()}


@pytest.mark.parametrize("family", [family.name for family in families.FAMILIES])
def test_family_computes_what_its_dequantised_weights_say(answers, family):
    """C06, C07, C22. gpt-oss copies its experts into parameters, and they were quantised without having arrived."""
    found = families.judge_single(answers[family])
    assert all(column["ok"] for column in found.values()), found


@pytest.mark.parametrize(("family", "column"), [("gpt-oss", "EP2"), ("Gemma-4-MoE", "TP2")])
def test_two_ranks_equal_one(answers, checkpoints, run_engines, family, column):
    """gpt-oss's loader slices ranks itself, and experts of other ranks arrive late; Gemma 4 has a dense part beside."""
    binding = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    (answer,) = run_engines([families.parallel_job(checkpoints[family], column)], **binding)
    found = families.judge_parallel(answers[family][3], answer)
    assert found["ok"], found


def test_table_in_the_docs_is_what_was_seen():
    document = json.loads(families.RESULTS.read_text())
    assert {*(family.name for family in families.FAMILIES), *families.ELSEWHERE} == set(document["families"])
    assert families.table(document) in families.DOCS.read_text(encoding="utf-8")
