"""A proxy killed with -9: compare what was sampled and received with what is stored and with the counts in the seals."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agl_otel.proxy.journal import FOLDER, SETTLED, unpacked
from agl_otel.proxy.recovery import read_journal
from agl_otel.queue.client import QueueClient
from agl_otel.service.framed import Frame, read
from agl_otel.settings import DAY_SECONDS, Settings
from agl_otel.types import AttemptedRollout
from agl_otel_hook import conventions
from agl_otel_hook.context import Key
from tests.contract.proxy.processes import healthy, rollout, start, stop
from tests.model_server import ModelServer
from tests.otlp_receiver import OtlpReceiver, Received
from tests.small_disk import fill, on_small_disk

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]


class Life:
    """Proxies of one data directory, one after the other."""

    def __init__(self, settings: Settings, receiver: OtlpReceiver, queue: QueueClient) -> None:
        self.settings, self.receiver, self.queue = settings, receiver, queue
        self.url = f"http://{settings.host}:{settings.proxy_port}"
        self.process: asyncio.subprocess.Process | None = None
        self.folder = settings.data_dir / FOLDER
        self.before: list[str] = []
        """Goes before the proxy's command line."""

    async def begin(self, **environment: str) -> None:
        self.process = await start("agl_otel.proxy", self.settings, before=self.before, **environment)
        await healthy(self.url)

    async def kill(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGKILL)
        await self.process.communicate()
        self.process = None

    async def end(self) -> str:
        assert self.process is not None
        _, err = await stop(self.process)
        self.process = None
        return err

    async def ask(self, session: aiohttp.ClientSession, key: Key, text: str, **options: Any) -> str:
        """Return the text of the answer; raise if it is incomplete."""
        url = f"{self.url}/rollout/{key[0]}/attempt/{key[1]}/v1/chat/completions"
        body = {"model": "m", "messages": [{"role": "user", "content": text}], **options}
        async with session.post(url, json=body) as answer:
            whole = await answer.read()
            assert answer.status == 200, whole
            return whole.decode()

    async def health(self) -> dict[str, Any]:
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/health") as answer:
            return await answer.json()

    async def close(self, key: Key) -> dict[str, int]:
        async with aiohttp.ClientSession() as session:
            while True:
                async with session.post(f"{self.url}/rollout/{key[0]}/attempt/{key[1]}/close") as answer:
                    if answer.status != 503:
                        assert answer.status == 200, await answer.text()
                        return (await answer.json())["counts"]

    def stored(self, key: Key) -> dict[str, Received]:
        """{span id: call}."""
        return {span.span_id: span for span in self.receiver.spans(conventions.SPAN_LLM) if span.key == key}

    async def proves(self, key: Key) -> str:
        """The verdict on the attempt after its close: `complete`, else why not."""
        (attempt,) = await self.queue.query_attempts([key[0]])
        counts = Counter(span.marker for span in self.stored(key).values())
        last: dict[str, tuple[int, int]] = {}
        for seal in self.receiver.spans(conventions.SPAN_SEAL):
            if seal.key == key and seal.attributes.get(conventions.SEAL_CLOSING):
                said = seal.attributes[conventions.SEAL_SPANS], seal.attributes[conventions.SEAL_DROPPED]
                last[seal.marker] = max(said, last.get(seal.marker, (0, 0)))
        for marker in {*(attempt.proxies or {}), *counts}:
            if marker not in last:
                return f"{marker} has no last seal"
            if last[marker] != (counts[marker], 0):
                return f"{marker} says {last[marker]}, and {counts[marker]} are stored"
        return "complete"


@pytest.fixture
async def life(settings: Settings, receiver: OtlpReceiver, queue: QueueClient) -> AsyncIterator[Life]:
    life = Life(settings, receiver, queue)
    yield life
    if life.process is not None:
        await life.kill()


def key_of(started: AttemptedRollout) -> Key:
    return started.rollout_id, started.attempt.attempt_id


def text_of(span: Received) -> str:
    return json.loads(span.attributes["gen_ai.input.messages"])[-1]["parts"][0]["content"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_was_answered_right_before_the_kill_is_not_lost(life: Life, model: ModelServer, stream: bool) -> None:
    key = key_of(await rollout(life.queue, model.url, "m"))
    life.receiver.refuse = True  # nothing leaves by the exporter
    await life.begin()
    async with aiohttp.ClientSession() as session:
        for text in ("one", "two"):
            await life.ask(session, key, text, stream=stream)
        await life.kill()
    life.receiver.refuse = False
    assert await life.proves(key) != "complete" and life.stored(key) == {}
    await life.begin()
    counts = await life.close(key)
    spans = list(life.stored(key).values())
    assert [text_of(span) for span in spans] == ["one", "two"] and counts == {spans[0].marker: 2}
    assert [span.attributes[conventions.LLM_CALL] for span in spans] == [1, 2] and not any(span.error for span in spans)
    assert [span.attributes[conventions.LLM_RESPONSE_TOKEN_IDS] for span in spans] == [
        [ord(c) for c in f"0:{t}"[::-1]] for t in ("one", "two")
    ]
    assert await life.proves(key) == "complete"
    assert len(list(life.folder.iterdir())) == 1, "the dead one's journal is gone"
    await life.end()
    assert list(life.folder.iterdir()) == []


async def test_a_call_in_flight_at_the_kill_makes_only_its_attempt_incomplete(life: Life, model: ModelServer) -> None:
    hit, whole = [key_of(await rollout(life.queue, model.url, "m")) for _ in range(2)]
    await life.begin()
    async with aiohttp.ClientSession() as session:
        await life.ask(session, whole, "whole")
        model.hold, _ = asyncio.Event(), model.asked.clear()
        cut = asyncio.create_task(life.ask(session, hit, "cut"))
        await model.asked.wait()
        await life.kill()
        with pytest.raises(aiohttp.ClientError):
            await cut
        model.hold.set()
        await life.begin()
        await life.ask(session, hit, "again")
    for key in (hit, whole):
        await life.close(key)
    assert await life.proves(whole) == "complete"
    assert "and 0 are stored" in await life.proves(hit)


async def test_attempts_continued_behind_another_proxy_are_complete(life: Life, model: ModelServer) -> None:
    """All was stored and sealed when the first one ended, cleanly or not, as its last seals show."""
    key = key_of(await rollout(life.queue, model.url, "m"))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        await life.begin()
        await life.ask(session, key, "one")
        await life.end()
        assert list(life.folder.iterdir()) == []
        await life.begin()
        await life.ask(session, key, "two")
        while b"two" in b"".join(path.read_bytes() for path in life.folder.rglob("*.calls")):  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.05)
        await life.kill()
        await life.begin()
        await life.ask(session, key, "three")
    assert sorted((await life.close(key)).values()) == [1, 1] and await life.proves(key) == "complete"
    assert sorted(text_of(span) for span in life.stored(key).values()) == ["one", "three", "two"]


async def test_what_was_acknowledged_is_not_sent_again(life: Life, model: ModelServer) -> None:
    first, second = [key_of(await rollout(life.queue, model.url, "m")) for _ in range(2)]
    await life.begin()
    async with aiohttp.ClientSession() as session:
        await life.ask(session, first, "stored")
        await life.ask(session, second, "stored")
        model.hold, _ = asyncio.Event(), model.asked.clear()
        under_way = asyncio.create_task(life.ask(session, second, "keeps the segment"))
        await model.asked.wait()
        while len({*life.stored(first), *life.stored(second)}) < 2 or settled(life.folder) < 2:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.05)
        await life.kill()
        with pytest.raises(aiohttp.ClientError):
            await under_way
        model.hold.set()
    await life.begin()
    await life.close(first)
    received = [span.span_id for span in life.receiver.spans(conventions.SPAN_LLM) if span.key in (first, second)]
    assert len(received) == len({*received}) == 2
    assert await life.proves(first) == "complete"


def settled(folder: Path) -> int:
    """Number of calls recorded as acknowledged in the journals."""
    frames = [frame for path in folder.rglob("*.calls") for frame in read(path) if isinstance(frame, Frame)]
    return sum(len(unpacked(frame.payload)[1]) // 8 for frame in frames if frame.kind == SETTLED)


async def test_without_the_disk_those_attempts_and_only_those_are_incomplete(life: Life, model: ModelServer) -> None:
    lost, later = [key_of(await rollout(life.queue, model.url, "m")) for _ in range(2)]
    life.receiver.refuse = True
    await life.begin()
    async with aiohttp.ClientSession() as session:
        await life.ask(session, lost, "lost")
        await life.kill()
        life.folder.rename(life.folder.with_name("elsewhere"))
        life.receiver.refuse = False
        await life.begin()
        await life.ask(session, later, "later")
        await life.ask(session, lost, "more")
    for key in (lost, later):
        await life.close(key)
    assert "has no last seal" in await life.proves(lost) and await life.proves(later) == "complete"


async def test_what_is_older_than_the_retention_is_removed_unsent(life: Life, model: ModelServer) -> None:
    key = key_of(await rollout(life.queue, model.url, "m"))
    life.receiver.refuse = True
    await life.begin()
    async with aiohttp.ClientSession() as session:
        await life.ask(session, key, "old")
    await life.kill()
    (folder,) = life.folder.iterdir()
    for path in folder.iterdir():
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 2 * DAY_SECONDS))
    life.receiver.refuse = False
    await life.begin(AGL_RETENTION_DAYS="1")
    assert not folder.exists()
    await life.close(key)
    assert "has no last seal" in await life.proves(key) and not life.stored(key)


async def test_a_full_disk_stops_no_call_but_makes_attempts_incomplete(life: Life, model: ModelServer) -> None:
    before, during = [key_of(await rollout(life.queue, model.url, "m")) for _ in range(2)]
    await life.begin()
    assert life.process is not None
    async with aiohttp.ClientSession() as session:
        await life.ask(session, before, "before")
        await life.close(before)
        resource.prlimit(life.process.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))  # EFBIG: SIGXFSZ is ignored by Python
        await life.ask(session, during, "during")
        counts = await life.close(during)
        assert list(counts.values()) == [1] and len(life.stored(during)) == 1
        assert "says (1, " in await life.proves(during) and await life.proves(before) == "complete"
        await life.ask(session, key_of(third := await rollout(life.queue, model.url, "m")), "third")
        await life.kill()
        await life.begin()
    await life.close(key_of(third))
    assert await life.proves(key_of(third)) != "complete" and await life.proves(before) == "complete"


async def test_a_proxy_reports_a_full_disk_and_recovers_when_there_is_room(life: Life, model: ModelServer) -> None:
    before, during, after = [key_of(await rollout(life.queue, model.url, "m")) for _ in range(3)]
    life.before = on_small_disk(life.folder, "4m")
    await life.begin()
    assert life.process is not None
    async with aiohttp.ClientSession() as session:
        await life.ask(session, before, "before")
        ballast = fill(life.process.pid, life.folder)
        await life.ask(session, during, "during" * 2000, stream=True)
        health = await life.health()
        assert health["status"] == "degraded"
        assert str(life.folder) in health["reason"] and "disk is full" in health["reason"] and "incomplete" in health["reason"]
        for key in (before, during):
            await life.close(key)
        assert "says (1, " in await life.proves(during) and len(life.stored(during)) == 1, "its span is stored all the same"
        ballast.unlink()
        while (await life.health())["status"] != "ok":  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.05)
        await life.ask(session, after, "after")
        await life.close(after)
    assert await life.proves(after) == await life.proves(before) == "complete"


async def test_no_files_are_left_of_acknowledged_sealed_or_deleted_attempts(life: Life, model: ModelServer) -> None:
    key, deleted, kept = [key_of(await rollout(life.queue, model.url, "m")) for _ in range(3)]
    await life.begin()

    def journals() -> bytes:
        return b"".join(path.read_bytes() for path in life.folder.rglob("*.calls"))

    async with aiohttp.ClientSession() as session:
        await life.ask(session, key, "a word of the prompt")
        assert b"a word of the prompt" in journals() and key[0].encode() in journals()
        while b"a word of the prompt" in journals():  # noqa: ASYNC110  # nobody tells; it is tidied a second after its last call
            await asyncio.sleep(0.05)
        assert key[0].encode() in journals(), "the attempt is not over"
        await life.close(key)
        while key[0].encode() in journals():  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.05)
        life.receiver.refuse = True
        for each in (deleted, kept):
            await life.ask(session, each, "a second word")
        async with session.post(f"{life.url}/delete", json={"rollouts": [deleted[0]]}) as answer:
            assert answer.status == 200, await answer.text()
        assert deleted[0].encode() not in journals() and kept[0].encode() in journals()
        await life.kill()
    await life.queue.delete([kept[0]])
    life.receiver.refuse = False
    await life.begin()
    while len(list(life.folder.iterdir())) > 1:  # noqa: ASYNC110  # nobody tells
        await asyncio.sleep(0.05)
    assert not any(text_of(span) == "a second word" for span in life.receiver.spans(conventions.SPAN_LLM)), "of a rollout that was deleted"


async def test_the_journal_is_masked_as_spans_are(life: Life, model: ModelServer, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\naction = "hash_text"\nrole = "user"\n')
    key = key_of(await rollout(life.queue, model.url, "m"))
    life.receiver.refuse = True
    await life.begin(AGL_MASK=str(rules))
    async with aiohttp.ClientSession() as session:
        await life.ask(session, key, "a secret word")
    await life.kill()
    (folder,) = life.folder.iterdir()
    assert b"a secret word" not in b"".join(path.read_bytes() for path in folder.iterdir())
    (dead,) = read_journal(folder).attempts.values()
    assert b"sha256:" in b"".join(dead.ended.values())


async def test_after_random_kills_under_load_no_attempt_with_a_lost_call_is_complete(life: Life, model: ModelServer) -> None:
    attempts, kills, turns = 120, 4, 4
    keys = [key_of(await rollout(life.queue, model.url, "m")) for _ in range(attempts)]
    received: dict[Key, set[str]] = {key: set() for key in keys}
    broken: set[Key] = set()
    await life.begin()

    async def agent(key: Key) -> None:
        async with aiohttp.ClientSession() as session:
            for turn in range(turns):
                text = f"{key[0]}/{turn}"
                for _ in range(200):
                    try:
                        await life.ask(session, key, text, stream=random.random() < 0.5)
                    except (aiohttp.ClientError, OSError) as error:
                        if not isinstance(error, aiohttp.ClientConnectorError):
                            broken.add(key)
                        await asyncio.sleep(random.uniform(0.05, 0.5))
                    else:
                        received[key].add(text)
                        break
                await asyncio.sleep(random.uniform(0, 0.3))

    async def killer(agents: asyncio.Future[Any]) -> None:
        for _ in range(kills):
            await asyncio.wait([agents], timeout=random.uniform(0.3, 1.5))
            await life.kill()
            await life.begin()

    waiting = asyncio.Semaphore(24)

    async def one(key: Key) -> None:
        async with waiting:
            await agent(key)

    agents = asyncio.gather(*map(one, keys))
    await asyncio.gather(killer(agents), agents)
    for key in keys:
        await life.close(key)
    sampled: dict[Key, Counter[str]] = {key: Counter() for key in keys}
    of = {key[0]: key for key in keys}
    for request in model.requests:
        text = request["messages"][-1]["content"]
        sampled[of[text.partition("/")[0]]][text] += 1
    complete = lossless = 0
    for key in keys:
        stored = Counter(text_of(span) for span in life.stored(key).values())
        verdict, lost = await life.proves(key), sampled[key] - stored
        assert received[key] <= set(stored), "whoever had the whole answer is in the store"
        assert len(received[key]) == turns
        assert not (lost and verdict == "complete"), (key, lost, verdict)
        complete += verdict == "complete"
        if not lost and key not in broken:
            lossless += 1
            assert verdict == "complete", (key, verdict)
    print(f"{attempts} attempts, {complete} complete, {lossless} never touched, {len(broken)} cut")
    assert lossless > attempts // 2 and broken
