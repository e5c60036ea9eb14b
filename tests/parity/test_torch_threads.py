"""Commits and results say with how many of torch's threads they were made."""

import json
import logging
import re

import pytest
import torch
from parity.models import SmallGPT, build
from parity.sessions import open_session

from offload.runs.inspection import inspect_store


def commit_with(num_threads, path):
    torch.set_num_threads(num_threads)
    with open_session(path) as session:
        session.wrap(build(SmallGPT))
        session.save("begun")


@pytest.mark.unified
@pytest.mark.parametrize("now", [2, 3])
def test_a_resume_with_another_number_of_threads_warns_once(tmp_path, caplog, now):
    commit_with(2, tmp_path)

    torch.set_num_threads(now)
    with caplog.at_level(logging.WARNING), open_session(tmp_path, resume=True) as session:
        session.wrap(build(SmallGPT))
        session.commit()

    found = [each.getMessage() for each in caplog.records if "threads" in each.getMessage()]
    assert len(found) == (now != 2)
    assert all(re.search(r"with 2 .* has 3: .* may differ", each) for each in found)
    assert inspect_store(tmp_path / "storage-storage").torch_threads == now


@pytest.mark.unified
def test_a_commit_that_does_not_say_its_threads_is_resumed_in_silence(
    tmp_path, monkeypatch, caplog
):
    with monkeypatch.context() as patched:
        patched.setattr("offload.streaming.models.torch.get_num_threads", lambda: None)
        commit_with(1, tmp_path)

    with caplog.at_level(logging.WARNING), open_session(tmp_path, resume=True):
        pass

    assert caplog.messages == []
    assert inspect_store(tmp_path / "storage-storage").torch_threads is None


def test_the_result_of_a_run_says_its_threads(tmp_path, small_config, train):
    torch.set_num_threads(2)

    result = train(small_config(train__steps=1), run_dir=tmp_path / "run")

    assert result.torch_threads == 2
    assert json.loads((tmp_path / "run" / "result.json").read_text())["torch_threads"] == 2
