"""What people see of a stage process in the flow run's log."""

from __future__ import annotations

import logging

import pytest

from tasks.processes import stage_log

ERROR_WITH_TRACEBACK = ["ERROR forge_core.stages: sft failed", "Traceback (most recent call last):", "ValueError: no"]


@pytest.mark.parametrize(
    ("lines", "levels"),
    [
        (["INFO forge_core.stages: rollout"], ["INFO"]),
        (["WARNING forge_core.stages.update: nothing to learn"], ["WARNING"]),
        (["INFO vllm.config: chatter", "a progress bar 100%"], ["DEBUG", "DEBUG"]),
        (["WARNING torch: chatter"], ["DEBUG"]),
        (ERROR_WITH_TRACEBACK, ["ERROR", "ERROR", "ERROR"]),
        ([*ERROR_WITH_TRACEBACK, "INFO forge_core.stages: next", "x"], ["ERROR", "ERROR", "ERROR", "INFO", "DEBUG"]),
    ],
)
def test_lines_arrive_at_sensible_levels(lines, levels, caplog: pytest.LogCaptureFixture):
    logger = logging.getLogger("stage-log")
    with caplog.at_level(logging.DEBUG, logger.name):
        write = stage_log("trainer", logger)
        for line in lines:
            write(line)
    assert [record.levelname for record in caplog.records] == levels
    assert all(record.getMessage().startswith("[trainer] ") for record in caplog.records)
