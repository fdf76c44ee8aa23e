"""The real server with hardly any memory for parked chats: they go to disk and come back (R23)."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.client import four_chats, stream_all, stream_one
from tests.e2e.server import running
from tests.e2e.test_pressure import POOL, SHORT_ANSWER_LEN, check_all_finished, check_notices


def test_chats_parked_on_disk_go_on_as_if_alone(tmp_path: Path) -> None:
    directory = tmp_path / "parked"
    flags = ("--preempt-ram", "1", "--preempt-disk", str(directory), "--verify-parks", "all")
    bodies = four_chats(SHORT_ANSWER_LEN)
    with running(*POOL, *flags) as server:
        alone = [stream_one(server, body).text for body in bodies]
        assert server.metric("n_preempt_total") == 0
        transcripts = stream_all(server, bodies)
        server.wait_until_idle()
        assert server.metric("parked_bytes_total") >= server.metric("restored_bytes_total") > 0
        for name in ("recompute_total", "copy_failed_total", "hash_mismatch_total"):
            assert server.metric(name) == 0, name
        assert server.metric("preempt_ram_bytes") == server.metric("preempt_disk_bytes") == 0
        assert "then disk, then computed again" in server.log.read_text()
    check_all_finished(transcripts, SHORT_ANSWER_LEN)
    check_notices(transcripts)
    assert [transcript.text for transcript in transcripts] == alone
    assert sum(transcript.notices.count(": preempted") for transcript in transcripts) >= 1
    assert list(directory.iterdir()) == []
