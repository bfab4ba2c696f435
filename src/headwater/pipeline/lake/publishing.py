"""The end of the stream of segments: what the tasks sealed is published in the manifest, once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from headwater.errors import StoreError
from headwater.pipeline.lake.disk import sync_directory
from headwater.pipeline.lake.layout import BRONZE
from headwater.pipeline.lake.manifest import LakeFile, Manifest

PUBLISHING = "headwater_lake"


@dataclass
class Sealed(WriterCommitMessage):
    """What one task of the writing side saw: the stretches that were read, and the files they became, as JSON."""

    stretches: list[tuple[int, int]]
    files: list[str]


class LakeSink(DataSource):
    @classmethod
    def name(cls) -> str:
        return PUBLISHING

    def streamWriter(self, schema: StructType, overwrite: bool) -> SegmentPublisher:
        return SegmentPublisher(self.options)


class SegmentPublisher(DataSourceStreamArrowWriter):
    def __init__(self, options: Mapping[str, str]) -> None:
        self._lake = Path(options["lake"])
        self._run = options["run"]

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sealed:
        rows = [row for batch in iterator for row in batch.to_pylist()]
        return Sealed(
            stretches=[(row["after"], row["upto"]) for row in rows if row["file"] is None],
            files=[row["file"] for row in rows if row["file"] is not None],
        )

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        sealed = [message for message in messages if isinstance(message, Sealed)]
        stretches = sorted(stretch for each in sealed for stretch in each.stretches)
        files = _files(sealed)
        if not stretches:
            return
        _refuse_holes(stretches)
        self._make_durable(files)
        now_ms = time.time_ns() // 1_000_000
        with closing(Manifest(self._lake)) as manifest:
            manifest.take_in(BRONZE, stretches[0][0], stretches[-1][1], files, now_ms, run=self._run)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Nothing: Spark also says this when a commit that went through could not tell so. What is not in the manifest
        is swept by the next run."""

    def _make_durable(self, files: Sequence[LakeFile]) -> None:
        """The tasks synced the files and their names; here the names of the directories, which another task may have
        made and not lived to sync. A file that is not there any more must not be named."""
        for file in files:
            if not (path := self._lake / file.path).exists() or path.stat().st_size != file.bytes:
                raise StoreError(f"{file.path} is not as it was sealed", where=str(self._lake), next="Run it again")
        directories = {parent for file in files for parent in (self._lake / file.path).parents}
        for directory in directories:
            if directory.is_relative_to(self._lake):
                sync_directory(directory)


def _files(sealed: Sequence[Sealed]) -> list[LakeFile]:
    return [msgspec.json.decode(text, type=LakeFile) for each in sealed for text in each.files]


def _refuse_holes(stretches: Sequence[tuple[int, int]]) -> None:
    """The tasks' stretches must join up: what lies between them would be lost for good."""
    for (_, upto), (after, _) in pairwise(stretches):
        if upto != after:
            raise StoreError(f"the batch has nothing between seq {upto} and {after}", next="Run it again")
