"""The retriever: BM25 (SQLite's full-text search) over corpus.py, behind HTTP.

    python retriever.py --port 8090

POST /retrieve {"query": …, "topk": 3} answers {"result": [{"text": …, "score": …}, …]}, the best first.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sqlite3

from aiohttp import web
from corpus import documents


class Index:
    def __init__(self, texts: list[str]) -> None:
        self._database = sqlite3.connect(":memory:")
        self._database.execute("CREATE VIRTUAL TABLE document USING fts5(text, tokenize = 'porter')")
        self._database.executemany("INSERT INTO document VALUES (?)", [(text,) for text in texts])

    def search(self, query: str, count: int) -> list[tuple[str, float]]:
        words = " OR ".join(f'"{word}"' for word in re.findall(r"\w+", query))
        found = "SELECT text, -bm25(document) FROM document WHERE document MATCH ? ORDER BY bm25(document) LIMIT ?"
        return self._database.execute(found, (words, count)).fetchall() if words else []


async def main(port: int) -> None:
    index = Index(documents())

    async def retrieve(request: web.Request) -> web.Response:
        asked = await request.json()
        found = index.search(asked["query"], int(asked.get("topk", 3)))
        return web.json_response({"result": [{"text": text, "score": score} for text, score in found]})

    app = web.Application()
    app.router.add_post("/retrieve", retrieve)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}/retrieve", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8090)
    asyncio.run(main(parser.parse_args().port))
