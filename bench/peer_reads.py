"""Read spans with Agent Lightning 0.3's client, one query_spans per rollout. Runs under an interpreter that has Agent Lightning 0.3.

python peer_reads.py URL CONCURRENT < rollout ids, one line per turn; prints the seconds and the number of spans of each turn.
"""

from __future__ import annotations

import asyncio
import sys
import time

import agentlightning  # pyright: ignore[reportMissingImports] - installed in another environment


async def main(url: str, concurrent: bool) -> None:
    """Run one turn per input line."""
    client = agentlightning.LightningStoreClient(url)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        ids = line.split()
        start = time.perf_counter()
        if concurrent:
            answers = await asyncio.gather(*(client.query_spans(rollout_id) for rollout_id in ids))
        else:
            answers = [await client.query_spans(rollout_id) for rollout_id in ids]
        print(time.perf_counter() - start, sum(len(answer) for answer in answers), flush=True)
    await client.close()


asyncio.run(main(sys.argv[1], sys.argv[2] == "1"))
