"""Search for the prompt with which the agent solves the tasks: APO in one script, without a key or network.

    python optimise.py [TARGET] [--run-dir FOLDER --data-dir FOLDER --port PORT --lost-after SECONDS]

Started again on the same folders it goes on where it was stopped, and pays for nothing twice. Rollouts that were queued then look for the
model where it was: a run that is to be gone on with needs a port of its own. Those that were running are run again when they have been
silent for so long.
"""

from __future__ import annotations

import argparse
import asyncio
import threading

from agent import answer
from openai import AsyncOpenAI
from server import Server, serve
from tasks import train, val
from words import WORDS

import agl_otel as agl
from agl_otel.algorithms.utils import retry_lost_runner


def background(server: Server, port: int) -> str:
    """Serve it from a thread for as long as this process lives; its address. Port 0: any."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return asyncio.run_coroutine_threadsafe(serve(server, port), loop).result()[1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", nargs="?", choices=WORDS, default="next")
    parser.add_argument("--run-dir")
    parser.add_argument("--data-dir", help="where the store is kept; without it nothing is")
    parser.add_argument("--port", type=int, default=0, help="where the model is served; without it anywhere")
    parser.add_argument("--lost-after", type=float, default=60.0, help="seconds of silence after which a rollout is run again")
    options = parser.parse_args()
    url = background(Server(), options.port)
    apo = agl.APO(
        AsyncOpenAI(base_url=url, api_key="none"),
        gradient_model="critic",
        apply_edit_model="editor",
        gradient_batch_size=3,
        val_batch_size=4,
        beam_width=2,
        branch_factor=2,
        beam_rounds=2,
        run_dir=options.run_dir,
        rollout_config=retry_lost_runner(unresponsive_seconds=options.lost_after),
        seed=0,
        max_editor_calls=100,
    )
    trainer = agl.Trainer(
        algorithm=apo,
        adapter=agl.TraceToMessages(),
        store=agl.Store.embedded(options.data_dir) if options.data_dir else None,
        strategy="shm",
        n_runners=2,
        initial_resources={
            "prompt_template": agl.PromptTemplate(template="answer", engine="f-string"),
            "main_llm": agl.LLM(endpoint=url, model="words"),
        },
    )
    trainer.fit(answer, train(options.target), val_dataset=val(options.target))
    for row in apo.history:
        print({name: row[name] for name in ("round", "best_version", "best_score", "editor_calls", "rollouts")})
    print(f"best prompt ({apo.best_score:.2f}): {apo.get_best_prompt().template}")


if __name__ == "__main__":
    main()
