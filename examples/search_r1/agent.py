"""Search-R1's agent (arXiv:2503.09516) over plain HTTP, without any SDK: think, search, read, and answer, in a model's own tags.

OPENAI_BASE_URL=http://localhost:8000/v1 OPENAI_API_KEY=none RETRIEVER_URL=http://localhost:8090/retrieve python agent.py "Where …?"
"""

import json
import os
import re
import sys
import urllib.request

MAX_TURNS = 4
INSTRUCTIONS = """Answer the question. First reason inside <think> and </think>. Where you lack knowledge, ask a search engine with
<search> query </search> and stop; it answers between <information> and </information>. You may search as often as you want. When you know
the answer, give it inside <answer> and </answer>, without explanation. Question: """


def post(url: str, body: dict[str, object], **headers: str) -> dict[str, object]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def ask(messages: list[dict[str, str]]) -> str:
    url, key = os.environ["OPENAI_BASE_URL"] + "/chat/completions", os.environ.get("OPENAI_API_KEY", "none")
    reply = post(url, {"model": os.environ.get("OPENAI_MODEL", "policy"), "messages": messages}, authorization=f"Bearer {key}")
    return reply["choices"][0]["message"]["content"]


def search(query: str) -> str:
    reply = post(os.environ.get("RETRIEVER_URL", "http://127.0.0.1:8090/retrieve"), {"query": query, "topk": 3})
    return "\n".join(f"({place}) {found['text']}" for place, found in enumerate(reply["result"], 1))


def solve(question: str) -> str:
    messages = [{"role": "user", "content": INSTRUCTIONS + question}]
    for _ in range(MAX_TURNS):
        said = ask(messages)
        messages.append({"role": "assistant", "content": said})
        if answer := re.search(r"<answer>(.*?)</answer>", said, re.DOTALL):
            return answer[1].strip()
        query = re.search(r"<search>(.*?)</search>", said, re.DOTALL)
        told = search(query[1]) if query else "Search with <search>, or answer with <answer>."
        messages.append({"role": "user", "content": f"<information>{told}</information>"})
    return ""


if __name__ == "__main__":
    print(solve(sys.argv[1]))
