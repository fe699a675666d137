"""Pack sdists again, without what differs from build to build: times, owners, order."""

import gzip
import io
import os
import sys
import tarfile
from pathlib import Path


def repack(archive: Path, epoch: int) -> None:
    """Write the archive anew with the same files."""
    packed = io.BytesIO()
    with tarfile.open(archive) as old, tarfile.open(fileobj=packed, mode="w") as new:
        for member in sorted(old.getmembers(), key=lambda each: each.name):
            member.mtime, member.uid, member.gid = epoch, 0, 0
            member.uname = member.gname = ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    archive.write_bytes(gzip.compress(packed.getvalue(), mtime=epoch))


for path in map(Path, sys.argv[1:]):
    repack(path, int(os.environ["SOURCE_DATE_EPOCH"]))
