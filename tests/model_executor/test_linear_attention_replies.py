"""The server tells the client why its prefill failed, and goes on serving."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import types
import urllib.error
import urllib.request

import pytest

from vllm_ext.model_executor import linear_attention_replies as replies
from vllm_ext.model_executor.linear_attention_failures import REASON_MARK

REASON = f"model.layers.0: {REASON_MARK} gated delta rule failed: a shape"


@pytest.fixture(autouse=True)
def forget():
    replies._reasons.clear()


class GenerationError(Exception):
    pass


@pytest.fixture
def serving():
    class Serving:
        def _raise_if_error(self, finish_reason, request_id):
            if finish_reason == "error":
                raise GenerationError("Internal server error")

    module = types.SimpleNamespace(Serving=Serving, GenerationError=GenerationError)
    for _ in range(2):
        replies.hook_serving(module)
    return Serving()


@pytest.mark.parametrize("part", ["", "-0", "_0"])
def test_reason_is_told_once_for_a_request_or_one_of_its_parts(serving, part):
    """vLLM numbers the prompts of a completion with a dash, the turns of a response with an underscore."""
    replies.keep(f"cmpl-12{part}", "another's")
    replies.keep(f"cmpl-1{part}", REASON)
    with pytest.raises(GenerationError, match=re.escape(REASON)):
        serving._raise_if_error("error", "cmpl-1")
    with pytest.raises(GenerationError, match="Internal server error"):
        serving._raise_if_error("error", "cmpl-1")
    serving._raise_if_error("stop", "cmpl-12")
    assert replies.take("cmpl-12") == "another's"


def test_only_our_reasons_are_noted():
    class OutputProcessor:
        def __init__(self):
            self.request_states = {"a-internal": types.SimpleNamespace(external_req_id="a")}

        def process_outputs(self, outputs, timestamp=None):
            return len(outputs), timestamp

    replies.hook_output_processor(types.SimpleNamespace(OutputProcessor=OutputProcessor))

    def output(stop_reason):
        return types.SimpleNamespace(request_id="a-internal", stop_reason=stop_reason, finish_reason=3)

    processor = OutputProcessor()
    assert processor.process_outputs([output("a stop string"), output(17), output(None)], timestamp=2) == (3, 2)
    assert replies.take("a") is None
    processor.process_outputs([output(REASON)])
    assert replies.take("a") == REASON


def test_reasons_nobody_asks_for_do_not_pile_up():
    for index in range(replies._MOST_KEPT + 5):
        replies.keep(f"cmpl-{index}", REASON)
    assert len(replies._reasons) == replies._MOST_KEPT
    assert replies.take("cmpl-0") is None


def test_beam_search_says_why_a_beam_has_no_next_token():
    """vLLM asks for the first of the token's log-probabilities, and a refused request has none."""

    class LLM:
        def __init__(self, refused=None):
            self.refused = refused

        def beam_search(self, prompts):
            if self.refused:
                replies.keep("7", self.refused)
            return [logprobs[0] for logprobs in prompts]

    for _ in range(2):
        replies.hook_beam_search(types.SimpleNamespace(LLM=LLM, other=None))
    assert LLM(refused=REASON).beam_search([["a"]]) == ["a"]
    with pytest.raises(RuntimeError, match=re.escape(REASON)) as caught:
        LLM(refused=REASON).beam_search([["a"], []])
    assert isinstance(caught.value.__cause__, IndexError)
    with pytest.raises(IndexError):
        LLM().beam_search([[]])  # not ours, whatever an earlier call left


PLUGIN = """
from vllm_ext._import_hooks import when_imported

def register():
    def refuse(module):
        right = module.chunk_gated_delta_rule
        def operator(**call):
            if 13 in call["cu_seqlens"].diff().tolist():
                raise ValueError("refused for a test")
            return right(**call)
        module.chunk_gated_delta_rule = operator
    when_imported("vllm_ext.model_executor.linear_attention", refuse)
"""


@pytest.fixture
def server(tiny_model, tmp_path):
    """A real server whose kernel refuses sequences of 13 tokens, by a plugin of its own: (address, its output)."""
    pytest.importorskip("vllm")
    plugin = tmp_path / "plugin" / "refusing-0.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: refusing\nVersion: 0\n")
    (plugin / "entry_points.txt").write_text("[vllm.general_plugins]\nrefusing = refusing_plugin:register\n")
    (tmp_path / "plugin" / "refusing_plugin.py").write_text(PLUGIN)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path / "plugin"), os.environ.get("PYTHONPATH")])),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        tiny_model("qwen3-next"),
        "--port",
        str(port),
    ]
    command += ["--attention-backend", "ha_npu", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "4"]
    command += ["--chat-template", "{% for message in messages %}{{ message.content }}{% endfor %}"]
    log = tmp_path / "server.log"
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=file, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 240
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() < deadline, log.read_text()[-4000:]
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}", log
    finally:
        process.terminate()
        process.wait(60)


def complete(address, length):
    """(status, body) of a completion for a prompt of so many tokens."""
    body = {"prompt": [(7 * i) % 251 for i in range(length)], "max_tokens": 2, "temperature": 0}
    return post(f"{address}/v1/completions", body)


def post(address, body):
    """(status, body) of an answer."""
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.mark.vllm
def test_a_refused_request_gets_status_500_with_the_reason_and_the_server_stays_up(server):
    address, log = server
    text = 13 * "a"  # a token is a byte
    beams = {"use_beam_search": True, "n": 2}
    refused = (
        complete(address, 13),
        post(f"{address}/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 2}),
        post(f"{address}/v1/responses", {"input": text, "max_output_tokens": 2}),
        post(f"{address}/v1/completions", {"prompt": text, "max_tokens": 2, **beams}),
        # Here the prompt passes, and each of two beams is refused when it has 13 tokens.
        post(f"{address}/v1/completions", {"prompt": text[1:], "max_tokens": 3, **beams}),
    )
    for status, body in refused:
        assert status == 500, body
        for part in ("model.layers.0.linear_attn", "gated delta rule", "refused for a test", "on_kernel_error"):
            assert part in json.dumps(body)
    status, body = complete(address, 14)
    assert status == 200
    assert body["choices"][0]["finish_reason"] == "length"
    assert "ends with an error" in log.read_text()
