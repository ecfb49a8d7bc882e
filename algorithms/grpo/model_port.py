"""What our model server and the one over vLLM share at their door: the command line and errors in OpenAI's form. Needs no torch."""

from __future__ import annotations

import argparse
from typing import Final

from aiohttp import web

MAX_BODY_BYTES: Final = 64 << 20


def parser_of(module: str, description: str) -> argparse.ArgumentParser:
    """The options that every model server has; its own are added to them."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--model", required=True, help="folder with model and tokenizer")
    parser.add_argument("--weights", help="folder with the weights to begin with  [default: the model's]")
    parser.add_argument("--version", default="0", help="of the weights to begin with")
    parser.add_argument("--port", type=int, default=8000, help="0: a free one")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--name", default="policy", help="the model's name in answers")
    return parser


def error_response(status: int, message: str) -> web.Response:
    """An error as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return web.json_response({"error": {"message": message, "type": kind, "param": None, "code": None}}, status=status)
