"""The retriever as an MCP server over HTTP: BM25 by SQLite's full-text search.

python retriever.py --port 8091          # http://127.0.0.1:8091/mcp
"""

import argparse
import re
import sqlite3

from documents import DOCUMENTS
from mcp.server.mcpserver import MCPServer

server = MCPServer("retriever")
database = sqlite3.connect(":memory:", check_same_thread=False)
database.execute("CREATE VIRTUAL TABLE document USING fts5(text, tokenize = 'porter')")
database.executemany("INSERT INTO document VALUES (?)", [(text,) for text in DOCUMENTS])


@server.tool()
def retrieve(query: str) -> str:
    """Return the two best matching passages of the handbook.

    Args:
        query: some words
    """
    words = " OR ".join(f'"{word}"' for word in re.findall(r"\w+", query))
    rows = database.execute("SELECT text FROM document WHERE document MATCH ? ORDER BY bm25(document) LIMIT 2", (words,)) if words else ()
    return "\n".join(text for (text,) in rows) or "nothing found"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8091)
    server.run("streamable-http", port=parser.parse_args().port)
