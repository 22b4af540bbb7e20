"""Runs clients that people use, as they come from PyPI, against a real server on the embedded model.

`python -m tools.real_clients [--folder DIR] [NAME ...]`: lm-eval, guidellm, aiperf, langchain, openai, anthropic; each in a
virtual environment of its own below DIR. Ends with one line for each client and exit code 1 if one of them failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minserve.clients.arithmetic_reference import PromptTokens, load_reference
from minserve.clients.openai_client import OpenAIClient
from minserve.config import EMBEDDED_DIRECTORY
from tools.launched import serving

MODEL = "embedded"
PACKAGES = {
    "lm-eval": ["lm-eval[api]", "transformers"],
    "guidellm": ["guidellm"],
    "aiperf": ["aiperf"],
    "langchain": ["langchain-openai"],
    "openai": ["openai"],
    "anthropic": ["anthropic"],
}
CLIENT_SECONDS = 900
_TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{{target}}}}}"
target_delimiter: ""
output_type: {kind}
{more}
"""
_GENERATE = """generation_kwargs:
  until: ["<|never|>"]
  max_gen_toks: 128
  do_sample: false
metric_list:
  - metric: exact_match
"""
_LIKELIHOOD = """metric_list:
  - metric: acc
"""
_LANGCHAIN = """
import sys
from langchain_openai import ChatOpenAI
model = ChatOpenAI(base_url=sys.argv[1], api_key="any", model="embedded", temperature=0, stream_usage=True)
pieces = list(model.stream("What is 23 + 58?"))
assert [piece.content for piece in pieces if piece.content] == ["8", "1"], pieces
usage = [piece.usage_metadata for piece in pieces if piece.usage_metadata]
assert len(usage) == 1 and usage[0]["output_tokens"] == 3, usage
assert model.invoke("What is 23 + 58?").content == "81"
assert [answer.content for answer in model.batch(["What is 1 + 2?", "What is 3 + 4?"])] == ["3", "7"]
print("streams, invokes and batches")
"""
_OPENAI = """
import sys
from openai import OpenAI
client = OpenAI(base_url=sys.argv[1], api_key="any", max_retries=0)
asked = dict(model="embedded", input="What is 23 + 58?", temperature=0)
assert client.responses.create(**asked).output_text == "81"
with client.responses.stream(**asked) as stream:
    kinds = [event.type for event in stream]
    assert stream.get_final_response().output_text == "81"
assert kinds[0] == "response.created" and kinds[-1] == "response.completed", kinds
print("a response, whole and streamed")
"""
_ANTHROPIC = """
import sys
from anthropic import Anthropic, BadRequestError
client = Anthropic(base_url=sys.argv[1].removesuffix("/v1"), api_key="any", max_retries=0)
question = dict(role="user", content="What is 23 + 58?")
asked = dict(model="embedded", max_tokens=9, messages=[question], extra_body={"temperature": 0})
message = client.messages.create(**asked)
assert (message.content[0].text, message.stop_reason) == ("81", "end_turn"), message
assert message._request_id
with client.messages.stream(**asked) as stream:
    assert "".join(stream.text_stream) == "81"
    assert stream.get_final_message().usage.output_tokens == message.usage.output_tokens
begun = client.messages.create(**{**asked, "messages": [question, dict(role="assistant", content="8")]})
assert begun.content[0].text == "1", begun
assert client.messages.count_tokens(model="embedded", messages=[question]).input_tokens == 13
try:
    client.messages.create(**{**asked, "messages": [dict(role="user", content=[dict(type="image", source={})])]})
    raise SystemExit("an image was not refused")
except BadRequestError as error:
    assert error.type == "invalid_request_error" and error.request_id, error
print("messages, whole, streamed and gone on with; counts; a refusal")
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *PACKAGES], metavar="NAME")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "minserve-clients")
    arguments = parser.parse_args()
    clients: dict[str, Callable[[Path, str, Path], str]] = {
        "lm-eval": lm_eval,
        "guidellm": guidellm,
        "aiperf": aiperf,
        "langchain": script(_LANGCHAIN),
        "openai": script(_OPENAI),
        "anthropic": script(_ANTHROPIC),
    }
    failed = False
    with serving([]) as server:
        for name in arguments.names or PACKAGES:
            programs = install(name, arguments.folder)
            with tempfile.TemporaryDirectory() as folder:
                try:
                    said = clients[name](programs, server.url, Path(folder))
                except (subprocess.SubprocessError, AssertionError, LookupError, OSError) as error:
                    failed, said = True, f"FAILED: {error}"
            sys.stdout.write(f"{name}: {said}\n")
            sys.stdout.flush()
    return int(failed)


def install(name: str, folder: Path) -> Path:
    """The bin directory of the client's environment, made on first use."""
    home = folder / name
    if not (home / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        command = [str(home / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
        subprocess.run([*command, *PACKAGES[name]], check=True)
        (home / "installed").touch()
    return home / "bin"


def run(words: list[str], folder: Path) -> str:
    """What a program printed. Raises CalledProcessError with the end of it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENAI_API_KEY": "any", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=CLIENT_SECONDS
    )
    assert done.returncode == 0, f"exit code {done.returncode}: ...{done.stdout[-2000:]}"
    return done.stdout


def lm_eval(programs: Path, root: str, folder: Path) -> str:
    """local-completions on the held-out arithmetic: generated answers, and log-probabilities of the right ones."""
    tokens = PromptTokens()
    data = folder / "arithmetic.jsonl"
    items = load_reference().items
    with data.open("w", encoding="utf-8") as file:
        for item in items:
            prompt, closed = tokens.texts(item)
            file.write(json.dumps({"prompt": prompt, "answer": item.answer, "closed": closed}) + "\n")
    tasks = (("generate", "generate_until", "answer", _GENERATE), ("likelihood", "loglikelihood", "closed", _LIKELIHOOD))
    for name, kind, target, more in tasks:
        text = _TASK.format(name=f"arithmetic_{name}", data=data, target=target, kind=kind, more=more)
        (folder / f"{name}.yaml").write_text(text)
    model = (
        f"model={MODEL},base_url={root}/v1/completions,num_concurrent=8,tokenizer={EMBEDDED_DIRECTORY},"
        "tokenizer_backend=huggingface,tokenized_requests=True,max_length=4096"
    )
    words = [
        str(programs / "lm-eval"),
        "run",
        "--model",
        "local-completions",
        "--model_args",
        model,
        "--include_path",
        str(folder),
    ]
    run([*words, "--tasks", "arithmetic_generate,arithmetic_likelihood", "--output_path", str(folder / "out")], folder)
    (found,) = (folder / "out").rglob("results*.json")
    results = json.loads(found.read_text())["results"]
    exact = results["arithmetic_generate"]["exact_match,none"]
    likely = results["arithmetic_likelihood"]["acc,none"]
    expected = asyncio.run(accuracy(root))
    assert exact == expected, f"exact_match {exact} is not the accuracy {expected} of the chat endpoint"
    return f"{len(items)} questions: exact_match {exact:.4f}, equal to the chat endpoint's; right answers greedy in {likely:.4f}"


async def accuracy(root: str) -> float:
    """Exact answers of the same items through chat completions, as `minserve eval arithmetic` asks them."""
    gate = asyncio.Semaphore(8)
    async with OpenAIClient(root) as client:

        async def exact(messages: list[dict[str, str]], answer: str) -> bool:
            async with gate:
                body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 128}
                said: str = (await client.post("/chat/completions", body))["choices"][0]["message"]["content"]
                return said == answer

        right = await asyncio.gather(*(exact(item.messages, item.answer) for item in load_reference().items))
    return sum(right) / len(right)


def guidellm(programs: Path, root: str, folder: Path) -> str:
    words = [str(programs / "guidellm"), "run", "--disable-progress"]
    words += ["--backend", f"kind=openai_http,target={root},model={MODEL}"]
    words += ["--tokenizer", f"kind=huggingface_auto,model={EMBEDDED_DIRECTORY}"]
    words += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"]
    words += ["--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=32"]
    run([*words, "--output", f"kind=json,path={folder / 'report.json'}"], folder)
    report = json.loads((folder / "report.json").read_text())
    totals = report["benchmarks"][0]["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (32, 0), totals
    return f"{totals['successful']} requests succeeded, {totals['errored']} failed"


def aiperf(programs: Path, root: str, folder: Path) -> str:
    words = [str(programs / "aiperf"), "profile", "-m", MODEL, "-u", root, "--endpoint-type", "chat", "--streaming"]
    words += ["--tokenizer", str(EMBEDDED_DIRECTORY), "--concurrency", "4", "--request-count", "32", "--ui-type", "none"]
    words += ["--synthetic-input-tokens-mean", "50", "--output-tokens-mean", "16", "--extra-inputs", "ignore_eos:true"]
    run([*words, "--artifact-dir", str(folder / "artifacts")], folder)
    report: dict[str, Any] = json.loads((folder / "artifacts" / "profile_export_aiperf.json").read_text())
    count = report["request_count"]["avg"]
    errors = report.get("error_request_count", {"avg": 0})["avg"]
    assert (count, errors) == (32, 0), report
    return f"{count:.0f} requests succeeded, {errors:.0f} failed"


def script(source: str) -> Callable[[Path, str, Path], str]:
    return lambda programs, root, folder: run([str(programs / "python"), "-c", source, f"{root}/v1"], folder).strip()


if __name__ == "__main__":
    sys.exit(main())
