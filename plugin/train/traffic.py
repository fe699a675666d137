"""What a server has recorded, as it was when a run began."""

from __future__ import annotations

from pathlib import Path

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.values import reason_of, shown
from vllm_graft.learn.records import PATTERN

_NAME = "traffic.jsonl"


def snapshot(folder: Path, work: Path, most: int | None = None) -> Path:
    """Copy the whole rows of a folder's records into a run's folder, for the run to go on with.
    `most`: bytes of the newest files, of which the last one may go over it; None takes all.

    Raises:
        ConfigError: there are none, or they can't be read.
    """
    copy = work / _NAME
    if copy.exists():
        return copy
    part, rows = work / f"{_NAME}.part", 0
    try:
        with part.open("wb") as written:
            for file in sorted(folder.glob(PATTERN), key=_age):
                if most is not None and written.tell() >= most:
                    break
                with file.open("rb") as lines:
                    # A server that is writing, or was killed, may leave half a row.
                    for line in lines:
                        if line.endswith(b"\n"):
                            rows += written.write(line) > 0
    except OSError as error:
        raise ConfigError(
            f"--from-traffic {shown(str(folder))} can't be read: {reason_of(error)}."
        ) from None
    if not rows:
        raise ConfigError(
            f"--from-traffic {shown(str(folder))} has no records: serve for a while with "
            "--additional-config.graft.learn.record set to it, or name the folder that has them."
        )
    part.rename(copy)
    return copy


def _age(file: Path) -> tuple[float, str]:
    """What sorts the newest first."""
    return -file.stat().st_mtime, file.name
