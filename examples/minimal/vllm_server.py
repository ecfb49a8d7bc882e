"""Run vLLM as a child process: start it, wait for it, request one answer with its token ids, and stop it.

python vllm_server.py MODEL         # a folder, or a name that vLLM can download; needs vllm and, for any speed, a GPU
"""

from __future__ import annotations

import argparse
import importlib.util
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from openai import APIConnectionError, OpenAI

START_SECONDS = 600.0


@contextmanager
def serve(model: str, *more: str) -> Iterator[str]:
    """Run `vllm serve` within the context; yield its base URL."""
    if importlib.util.find_spec("vllm") is None:
        raise SystemExit("vLLM is not installed in this environment: pip install vllm")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--generation-config", "vllm", *more]  # OpenAI's sampling defaults instead of the model's
    process = subprocess.Popen(command)
    try:
        _wait(process, url := f"http://127.0.0.1:{port}/v1")
        yield url
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    client = OpenAI(base_url=url, api_key="none", max_retries=0)
    while process.poll() is None and time.monotonic() < deadline:
        try:
            client.models.list()
            return
        except APIConnectionError:
            time.sleep(1)
    raise SystemExit(f"vLLM did not start: exit code {process.poll()}; what it printed is above")


def main(model: str) -> None:
    with serve(model) as url:
        client = OpenAI(base_url=url, api_key="none")
        served = client.models.list().data[0].id
        messages = [{"role": "user", "content": "Say hello."}]
        reply = client.chat.completions.create(
            model=served, messages=messages, max_tokens=16, logprobs=True, extra_body={"return_token_ids": True}
        )
        choice = reply.choices[0]
        print(choice.message.content)
        print(f"prompt {reply.model_extra['prompt_token_ids']}, reply {choice.model_extra['token_ids']}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    main(parser.parse_args().model)
