"""Running Python functions in Spark's workers: one call per task, results and errors as data.

On a classic Spark the calls run as an RDD, which needs a SparkContext and nothing of Spark SQL: a process that runs one
job starts and ends in less than half the time. Spark Connect has no RDDs; there the same calls run inside a DataFrame.
"""

from __future__ import annotations

import pickle
import re
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from headwater.errors import HeadwaterError, StoreError
from headwater.pipeline.session import TASK_ATTEMPTS_MAX

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import SparkContext

    from headwater.pipeline.session import Spark

T = TypeVar("T")
R = TypeVar("R")

POLL_S = 0.1
# A traceback of Python inside the text of an error of Java: its last line, which names the error.
_PYTHON_ERROR = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n)+(\S.*)")


def run_tasks(
    spark: Spark,
    fn: Callable[[T], R],
    tasks: Sequence[T],
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> list[R]:
    """Call `fn(task)` once per task in Spark's Python workers, and return the results in the order of the tasks.

    `fn`, tasks and results are pickled; the workers need Headwater. A HeadwaterError of `fn` is raised here as it was
    raised there; Spark repeats a task after any other error, and the last one becomes a StoreError. `on_progress(done,
    total)` is called in this thread while the tasks run. An exception in this thread, such as KeyboardInterrupt,
    cancels them.
    """
    if not tasks:
        return []
    job = _ConnectJob(spark.session) if spark.is_connect else _RddJob(spark.context)
    answers: Future[list[bytes]] = Future()
    reported = -1
    # In a thread of its own, so that this one can report progress and be interrupted.
    threading.Thread(target=_run, args=(job, _Call(fn, tasks), answers), name=job.id, daemon=True).start()
    try:
        while not wait([answers], POLL_S).done:
            if (done := min(job.done_count(), len(tasks))) > reported:
                on_progress(done, len(tasks))
                reported = done
    except BaseException:
        job.cancel()
        raise
    results: list[R] = []
    for answer in answers.result():
        error, value = pickle.loads(answer)
        if error is not None:
            error.add_note(value)
            raise error
        results.append(value)
    if reported < len(tasks):
        on_progress(len(tasks), len(tasks))
    return results


def _run(job: _RddJob | _ConnectJob, call: _Call, answers: Future[list[bytes]]) -> None:
    try:
        answers.set_result(job.run(call))
    except Exception as exc:
        text = str(exc)  # it comes from the JVM, so it is read as long as there is one
        advice = "Run it again: it continues where it stopped"
        if in_python := _PYTHON_ERROR.findall(text):
            why = in_python[-1]
            advice = "Check that Spark's workers have the same Python, with Headwater and its extra `spark`"
        else:
            lines = [line.removeprefix(": ") for line in text.splitlines() if not line.startswith("An error occurred")]
            why = next(filter(str.strip, lines), type(exc).__name__)
        error = StoreError(f"Spark could not run the tasks ({why})", where="Spark", next=advice)
        error.add_note(text)
        answers.set_exception(error)


class _Call(NamedTuple):
    """What a worker runs: the function and all tasks travel together, a task is picked by its number."""

    fn: Callable[[Any], Any]
    tasks: Sequence[Any]

    def answer(self, number: int) -> bytes:
        """`(None, result)`, or the error and its trace."""
        from pyspark import TaskContext

        try:
            return pickle.dumps((None, self.fn(self.tasks[number])), protocol=pickle.HIGHEST_PROTOCOL)
        except HeadwaterError as exc:
            return pickle.dumps((exc, traceback.format_exc()))
        except Exception as exc:
            context = TaskContext.get()
            if context is not None and context.attemptNumber() + 1 < TASK_ATTEMPTS_MAX:
                raise  # Spark runs the task again
            # As text, because its class may not exist where it is raised again.
            what = f"a task failed {TASK_ATTEMPTS_MAX} times: {type(exc).__name__}: {exc}"
            return pickle.dumps((StoreError(what, where="Spark"), traceback.format_exc()))

    def answers(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield pa.RecordBatch.from_pydict({"number": [number], "answer": [self.answer(number)]})


class _RddJob:
    def __init__(self, context: SparkContext) -> None:
        self.id = f"headwater-{uuid.uuid4()}"
        self._context = context

    def run(self, call: _Call) -> list[bytes]:
        self._context.setJobGroup(self.id, "headwater tasks", interruptOnCancel=True)
        count = len(call.tasks)
        return self._context.parallelize(range(count), count).map(call.answer).collect()

    def done_count(self) -> int:
        tracker = self._context.statusTracker()
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(self.id)]
        stages = [tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds]
        return sum(stage.numCompletedTasks for stage in stages if stage is not None)

    def cancel(self) -> None:
        self._context.cancelJobGroup(self.id)


class _ConnectJob:
    def __init__(self, session: Any) -> None:
        self.id = f"headwater-{uuid.uuid4()}"
        self._session = session
        self._done = 0

    def run(self, call: _Call) -> list[bytes]:
        session, count = self._session, len(call.tasks)
        session.addTag(self.id)  # tags belong to the thread
        session.registerProgressHandler(self._on_progress)
        try:
            frame = session.range(0, count, 1, count).mapInArrow(call.answers, "number long, answer binary")
            return list(frame.toArrow().sort_by("number").column("answer").to_pylist())
        finally:
            session.removeProgressHandler(self._on_progress)

    def _on_progress(self, stages: Any, inflight_tasks: int, operation_id: str | None, done: bool) -> None:
        self._done = sum(stage.num_completed_tasks for stage in stages or ())

    def done_count(self) -> int:
        return self._done

    def cancel(self) -> None:
        self._session.interruptTag(self.id)
