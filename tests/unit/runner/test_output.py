from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_otel.runner.output import RECORD_BYTES, AttemptOutput, Capture, pending_output, pieces, to_records
from agl_otel_hook import conventions

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@given(st.lists(st.binary(max_size=30), max_size=20), st.integers(min_value=2, max_value=64).map(lambda n: 2 * n))
def test_first_and_last_half_are_kept_and_the_cut_bytes_counted(chunks: list[bytes], keep: int) -> None:
    capture, whole = Capture("stdout", keep), b"".join(chunks)
    for chunk in chunks:
        if chunk:
            capture.feed(chunk)
    assert capture.total_bytes == len(whole)
    assert capture.cut_bytes == max(0, len(whole) - keep)
    text = capture.text()
    if not capture.cut_bytes:
        assert text == whole.decode(errors="replace")
    else:
        assert text.startswith(whole[: keep // 2].decode(errors="replace"))
        assert text.endswith(whole[-(keep // 2) :].decode(errors="replace"))
        assert f"{capture.cut_bytes} of {len(whole)} bytes cut" in text


@given(st.text(alphabet="ab\n", max_size=200), st.integers(min_value=1, max_value=20))
def test_pieces_are_bounded_and_whole(text: str, limit: int) -> None:
    cut = pieces(text, limit)
    assert "".join(cut) == text
    assert all(0 < len(piece) <= limit for piece in cut)


def test_records_carry_ids_stream_and_trace_and_keep_escapes() -> None:
    out, err = Capture("stdout"), Capture("stderr")
    out.feed(b"\x1b[31mred\x1b[0m\n")
    err.feed(b"x" * (RECORD_BYTES + 1))
    printed = AttemptOutput("ro-1", "at-1", TRACEPARENT, [out, err])
    records = [record for pending in pending_output(printed) for record in to_records(printed, pending)]
    assert [r.body.string_value for r in records] == ["\x1b[31mred\x1b[0m\n", "x" * RECORD_BYTES, "x"]
    attributes = [{a.key: a.value.string_value for a in r.attributes} for r in records]
    assert attributes[0] == {conventions.ROLLOUT_ID: "ro-1", conventions.ATTEMPT_ID: "at-1", conventions.LOG_STREAM: "stdout"}
    assert [a[conventions.LOG_STREAM] for a in attributes] == ["stdout", "stderr", "stderr"]
    assert records[0].trace_id.hex() == TRACEPARENT.split("-")[1]
    assert records[1].time_unix_nano < records[2].time_unix_nano


def test_a_silent_process_makes_no_records() -> None:
    assert pending_output(AttemptOutput("ro-1", "at-1", TRACEPARENT, [Capture("stdout"), Capture("stderr")])) == []


@given(st.lists(st.binary(max_size=30), max_size=20), st.integers(min_value=2, max_value=64).map(lambda n: 2 * n))
def test_output_is_stored_exactly_once_while_running_and_at_the_end(chunks: list[bytes], keep: int) -> None:
    capture, found = Capture("stdout", keep), b""
    for chunk in (chunk.replace(b"\xff", b"").decode(errors="ignore").encode() for chunk in chunks):
        if chunk:
            capture.feed(chunk)
        pending = capture.pending(final=False)
        assert not pending.text or pending.text.endswith("\n")
        found += pending.text.encode()
        capture.stored(pending.upto)
    text = capture.text()
    if not capture.cut_bytes and text.isascii():
        assert found.decode() + capture.pending(final=True).text == text


NOISE = """Transient error HTTPConnectionPool(host='127.0.0.1', port=4318) encountered while exporting span batch, retrying in 1.07s.
Failed to export traces to 127.0.0.1:4317, error code: StatusCode.UNAVAILABLE, error details: connection refused
Exception while exporting Span.
Traceback (most recent call last):
  File "/x/opentelemetry/sdk/_shared_internal/__init__.py", line 179, in _export
    self._exporter.export(
requests.exceptions.ReadTimeout: HTTPConnectionPool(host='127.0.0.1', port=4318): Read timed out.
"""
TRACEBACK = """Traceback (most recent call last):
  File "/tmp/agent.py", line 9, in <module>
    answer()
    ^^^^^^^^
  File "/tmp/agent.py", line 5, in answer
    raise RuntimeError("the server answered 502")
    ^^^^^
openai.InternalServerError: Error code: 502 - the model server is gone
and a second line of it
"""


@pytest.mark.parametrize(
    "printed",
    [
        pytest.param(TRACEBACK, id="alone"),
        pytest.param(TRACEBACK + NOISE, id="and then the exporter's errors"),
        pytest.param(NOISE + TRACEBACK + NOISE, id="between the exporter's errors"),
        pytest.param(NOISE + TRACEBACK + "\n".join(NOISE.splitlines()[:2] * 20) + "\n", id="and then many of them"),
    ],
)
def test_the_error_of_a_traceback_comes_first(printed: str) -> None:
    capture = Capture("stderr")
    capture.feed(printed.encode())
    words = capture.error_lines()
    assert words.splitlines()[:2] == ["openai.InternalServerError: Error code: 502 - the model server is gone", "and a second line of it"]
    assert "4318" not in words and "4317" not in words
    assert 'File "/tmp/agent.py", line 5, in answer' in words, "where it came from follows"


def test_without_a_traceback_the_error_is_the_last_lines_but_the_exporters_if_there_are_others() -> None:
    capture = Capture("stderr")
    capture.feed(f"no such file: data.csv\n{NOISE}".encode())
    assert capture.error_lines() == "no such file: data.csv"
    alone = Capture("stderr")
    alone.feed(NOISE.encode())
    assert alone.error_lines() == ""


def test_last_lines_omit_empty_lines() -> None:
    capture = Capture("stderr")
    capture.feed(b"Traceback:\n\n  File x\n\nValueError: no\n\n")
    assert capture.last_lines(2) == "  File x\nValueError: no"


def test_a_line_of_any_length_is_looked_through_once() -> None:
    """Not once more from each beginning of what an exporter logs: such a test would not end."""
    capture = Capture("stderr", 1 << 25)
    capture.feed(b"Transient error " * 500_000)
    capture.feed(b"\nTransient error StatusCode.UNAVAILABLE encountered while exporting traces, retrying.\nend\n")
    words = capture.error_lines(characters=1 << 30)
    assert words.endswith("Transient error\nend") and "UNAVAILABLE" not in words
