"""The users: rate each answer after the fact, over REST. `python users.py`, beside `agl-otel train`; `--at-random` is the control."""

from __future__ import annotations

import argparse
import json
import os
import random
import time
import urllib.error
import urllib.request
from pathlib import Path

ANSWERED = Path(__file__).with_name("answered.jsonl")
URL = f"http://127.0.0.1:{os.environ.get('AGL_WEB_PORT', '4748')}/v1/agl/feedback"


def main(at_random: bool) -> None:
    ANSWERED.touch()
    with ANSWERED.open() as file:
        while True:
            line = file.readline()
            if not line.endswith("\n"):  # nothing new, or half a line
                file.seek(file.tell() - len(line))
                time.sleep(0.05)
                continue
            given = json.loads(line)
            value = random.random() < 0.5 if at_random else given["answer"] == given["expected"]
            body = {"rollout_id": given["rollout_id"], "value": value, "source": "users"}
            request = urllib.request.Request(URL, json.dumps(body).encode(), {"content-type": "application/json"})
            try:
                with urllib.request.urlopen(request) as answer:
                    answer.read()
            except urllib.error.HTTPError as error:
                if error.code != 404:  # an answer of another stack's, from before
                    raise


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at-random", action="store_true", help="Rate without looking.")
    main(parser.parse_args().at_random)
